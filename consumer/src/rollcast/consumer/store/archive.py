"""The archive of `torch.save`: byte for byte what torch makes of the same records, in a part of the time."""

from collections.abc import Callable
from struct import Struct

from isal.isal_zlib import crc32
from xxhash import xxh3_128_intdigest

ALIGNMENT = 64
"""The data of each record begins at a multiple of so many bytes, so that it can be mapped."""

_FOLDER = b"archive/"
_UTF8, _SIZES_FOLLOW = 0x0800, 0x0008
# Numbers from these on stand in fields that were added to the format later.
_WIDE, _MANY = 0xFFFFFFFF, 0xFFFF
_ZIP64, _MADE_BY, _NEEDED = 1, 0x031E, 45
_PADDING = int.from_bytes(b"FB", "little")

_local_header = Struct("<4s5H3I2H")
_extra_header = Struct("<2H")
_sizes = Struct("<4s3I")
_wide_sizes = Struct("<4sI2Q")
_entry = Struct("<4s6H3I5H2I")
_wide_end = Struct("<4sQ2H2I4Q")
_locator = Struct("<4sIQI")
_end = Struct("<4s4H2IH")


class Archive:
    """Records one after the other, then the directory that tells where they are.

    Args:
        write: takes the bytes, in order.
    """

    def __init__(self, write: Callable[[bytes | memoryview], object]) -> None:
        self._write = write
        self._offset = 0
        self._entries: list[bytes] = []

    def add(self, name: str, data: bytes | memoryview) -> None:
        """Writes a record.

        Args:
            name: unlike that of any other.
            data: bytes.
        """
        path, size, offset = _FOLDER + name.encode(), len(data), self._offset
        padding = -(offset + _local_header.size + len(path) + _extra_header.size) % ALIGNMENT
        flags = _UTF8 | (_SIZES_FOLLOW if size else 0)
        head = _local_header.pack(b"PK\3\4", 0, flags, 0, 0, 0, 0, 0, 0, len(path), _extra_header.size + padding)
        self._put(head + path + _extra_header.pack(_PADDING, padding) + b"Z" * padding)
        check = crc32(data)
        if size:
            self._put(data)
            self._put((_sizes if size < _WIDE else _wide_sizes).pack(b"PK\7\x08", check, size, size))
        extra = _wide_numbers(size, size, offset)
        size, offset = min(size, _WIDE), min(offset, _WIDE)
        where = (len(path), len(extra), 0, 0, 0, 0, offset)
        self._entries.append(_entry.pack(b"PK\1\2", 0, 0, flags, 0, 0, 0, check, size, size, *where) + path + extra)

    @property
    def digest(self) -> int:
        """Digest, of 128 bits, of the names and check sums of the records so far."""
        return int(xxh3_128_intdigest(b"".join(self._entries)))

    def end(self) -> None:
        """Writes the directory; without it an archive is seen to be cut short."""
        count, start = len(self._entries), self._offset
        self._put(b"".join(self._entries))
        end, size = self._offset, self._offset - start
        # What it says of its length leaves out the signature and that number.
        about = (_wide_end.size - 12, _MADE_BY, _NEEDED, 0, 0)
        self._put(_wide_end.pack(b"PK\6\6", *about, count, count, size, start))
        self._put(_locator.pack(b"PK\6\7", 0, end, 1))
        count, size, start = min(count, _MANY), min(size, _WIDE), min(start, _WIDE)
        self._put(_end.pack(b"PK\5\6", 0, 0, count, count, size, start, 0))

    def _put(self, data: bytes | memoryview) -> None:
        self._write(data)
        self._offset += len(data)


def _wide_numbers(*numbers: int) -> bytes:
    """Returns an extra field with the numbers that are too large for their own."""
    wide = [number.to_bytes(8, "little") for number in numbers if number >= _WIDE]
    return b"".join((_extra_header.pack(_ZIP64, 8 * len(wide)), *wide)) if wide else b""
