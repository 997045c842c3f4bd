"""Content of a slot to parts of bounded size."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import xxhash

from rollcast.schemas.codec import DELTA_PLANES, RAW, compress
from rollcast.schemas.dtypes import PACKED_VALUE, item_bytes
from rollcast.schemas.errors import ContractError
from rollcast.schemas.events import Column, SamplePart, TensorSlice
from rollcast.schemas.framing import check_value, encode_announced, encode_column, encode_value
from rollcast.schemas.limits import DEFAULT_LIMITS, DEFAULT_MAX_PART_BYTES

MIN_PART_BYTES = 16 * 1024
"""Smallest `max_part_bytes`: room for the identity, a long column name and some data."""

MAX_NAME_BYTES = DEFAULT_LIMITS.max_name_chars
"""Longest column name, encoded."""

MAX_DIMENSIONS = 64
"""Most dimensions of a tensor."""

# Columns of these names differ by little: the engine's, the reference's and the trainer's view of one token.
_KIN_SUFFIX = "log_probs"
_MAX_INLINE_BYTES = 1024
_MAX_SLICE_BYTES = 512 * 1024
# A value takes at least a byte, so that a part's inline values stay below `Limits.max_inline_values`.
_MAX_PLAIN_BYTES_A_PART = 48 * 1024
# What compresses well must not make a part that decodes to more than `Limits.max_part_raw_bytes`.
_MAX_RAW_BYTES_A_PART = 8 * 1024 * 1024
_ENVELOPE_BYTES = 128
_SLICE_OVERHEAD_BYTES = 96


def pack_large_values(columns: Iterable[Column]) -> list[Column]:
    """Returns the columns with each plain value over 1 KiB turned into a byte tensor, which can be cut.

    Raises:
        ContractError: a name is too long, or a value has more items than any reader takes.
    """
    return [_packed(column) for column in columns]


def _packed(column: Column) -> Column:
    if len(column.name.encode()) > MAX_NAME_BYTES:
        raise ContractError(f"column name {column.name[:40]!r}... is longer than {MAX_NAME_BYTES} bytes; shorten it")
    if isinstance(column.value, TensorSlice):
        return column
    body = encode_value(column.value)
    if len(body) <= _MAX_INLINE_BYTES:
        return column
    if len(body) > DEFAULT_LIMITS.max_items:
        check_value(body)
    packed = TensorSlice(
        dtype=PACKED_VALUE,
        shape=(len(body),),
        total_bytes=len(body),
        offset=0,
        slice_bytes=len(body),
        codec=RAW,
        data=body,
    )
    return Column(column.name, column.leaf, packed)


def content_digest(columns: Iterable[Column]) -> bytes:
    """Returns the XXH3-128 of a slot's content: each column's canonical Avro bytes, followed by its tensor bytes.

    It does not depend on how the content is cut or compressed. `columns` are packed, tensors whole.
    """
    digest = xxhash.xxh3_128()
    for column in columns:
        digest.update(encode_announced(column))
        if isinstance(column.value, TensorSlice):
            digest.update(column.value.data)
    return bytes(digest.digest())


def split(
    slot: SamplePart, columns: Sequence[Column], max_part_bytes: int = DEFAULT_MAX_PART_BYTES
) -> list[SamplePart]:
    """Cuts packed columns (tensors whole, codec `RAW`) into parts whose frames are at most `max_part_bytes`.

    Args:
        slot: whose content it is; its own part number and columns do not matter.
        columns: the content.
        max_part_bytes: the limit.

    Raises:
        ContractError: `max_part_bytes` is below `MIN_PART_BYTES`, or the run id leaves no room in it.
    """
    room = max_part_bytes - _ENVELOPE_BYTES - len(slot.run_id.encode()) - len(slot.stream.encode())
    if max_part_bytes < MIN_PART_BYTES or room < MIN_PART_BYTES // 2:
        raise ContractError(f"max_part_bytes is {max_part_bytes}; it must be at least {MIN_PART_BYTES}")
    full: list[_OpenPart] = []
    current = _OpenPart()
    for column, overhead in _pieces(columns, room):
        encoded, size = current.encoded(column, overhead)
        if current.columns and not (current.used + size).fits(room):
            full.append(current)
            current = _OpenPart()
            if isinstance(encoded.value, TensorSlice) and encoded.value.base is not None:
                encoded, size = current.encoded(column, overhead)
        current.add(column, encoded, size)
    full.append(current)
    return [
        replace(slot, part=part, part_count=len(full), columns=tuple(each.columns)) for part, each in enumerate(full)
    ]


@dataclass(frozen=True, slots=True)
class _Size:
    encoded: int = 0
    plain: int = 0
    raw: int = 0

    def __add__(self, other: "_Size") -> "_Size":
        return _Size(self.encoded + other.encoded, self.plain + other.plain, self.raw + other.raw)

    def fits(self, room: int) -> bool:
        return self.encoded <= room and self.plain <= _MAX_PLAIN_BYTES_A_PART and self.raw <= _MAX_RAW_BYTES_A_PART


class _OpenPart:
    """A part that is being filled."""

    def __init__(self) -> None:
        self.columns: list[Column] = []
        self.used = _Size()
        self._kin: dict[tuple[str, int, int], tuple[int, bytes | memoryview]] = {}

    def encoded(self, column: Column, overhead: int) -> tuple[Column, _Size]:
        """Returns the column as it would stand in this part, and its size; `overhead` is what a slice adds at most."""
        piece = column.value
        if not isinstance(piece, TensorSlice):
            size = len(encode_column(column))
            return column, _Size(encoded=size, plain=size)
        index, base = self._kin.get(_range(piece), (None, None)) if _has_kin(column) else (None, None)
        codec, data = compress(piece.data, item_bytes(piece.dtype), base)
        encoded = piece.another(
            offset=piece.offset,
            slice_bytes=piece.slice_bytes,
            codec=codec,
            data=data,
            base=index if codec == DELTA_PLANES else None,
        )
        # A column counts as one value too.
        return Column(column.name, column.leaf, encoded), _Size(overhead + len(data), 1, piece.slice_bytes)

    def add(self, column: Column, encoded: Column, size: _Size) -> None:
        """Takes a column, as it was and as `encoded` has returned it."""
        if isinstance(column.value, TensorSlice) and _has_kin(column):
            self._kin.setdefault(_range(column.value), (len(self.columns), column.value.data))
        self.columns.append(encoded)
        self.used += size


def _has_kin(column: Column) -> bool:
    return column.name.endswith(_KIN_SUFFIX)


def _range(piece: TensorSlice) -> tuple[str, int, int]:
    return piece.dtype, piece.offset, piece.slice_bytes


def _pieces(columns: Sequence[Column], room: int) -> Iterator[tuple[Column, int]]:
    for column in columns:
        if isinstance(column.value, TensorSlice):
            yield from _cut(column, column.value, room)
        else:
            yield column, 0


def _cut(column: Column, whole: TensorSlice, room: int) -> Iterator[tuple[Column, int]]:
    overhead = _SLICE_OVERHEAD_BYTES + len(column.name.encode()) + 10 * len(whole.shape)
    width = item_bytes(whole.dtype)
    step = min(_MAX_SLICE_BYTES, room - overhead) // width * width
    if step <= 0:
        raise ContractError(f"column {column.name!r} has {len(whole.shape)} dimensions: no part can hold its shape")
    data = memoryview(whole.data)
    for offset in range(0, whole.total_bytes, step) if whole.total_bytes else (0,):
        raw = data[offset : offset + step]
        piece = whole.another(offset=offset, slice_bytes=len(raw), codec=RAW, data=raw)
        yield Column(column.name, column.leaf, piece), overhead
