"""Content of a slot to parts of bounded size, and back."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import xxhash

from rollcast.schemas.codec import DELTA_PLANES, RAW, Bytes, compress, decompress_into
from rollcast.schemas.dtypes import ITEM_BYTES, PACKED_VALUE, item_bytes
from rollcast.schemas.errors import ContractError, LimitError, ShardContentError
from rollcast.schemas.events import Column, SamplePart, TensorSlice
from rollcast.schemas.framing import check_value, decode_value, encode_announced, encode_column, encode_value
from rollcast.schemas.limits import DEFAULT_LIMITS, DEFAULT_MAX_PART_BYTES, Limits

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
        encoded = replace(piece, codec=codec, base=index if codec == DELTA_PLANES else None, data=data)
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
        yield Column(column.name, column.leaf, replace(whole, offset=offset, slice_bytes=len(raw), data=raw)), overhead


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedSlice(TensorSlice):
    """A decoded slice that stands at its place in the memory of its whole tensor already.

    Attributes:
        whole: memory of the whole tensor, the same object for all slices that stand in it; of this slice alone, if
            it stands alone.
        encoded_bytes: size of the slice as it came.
        owner: what must live as long as the slice.
    """

    whole: memoryview
    encoded_bytes: int
    owner: object


def join(parts: Sequence[SamplePart], limits: Limits = DEFAULT_LIMITS) -> list[Column]:
    """Returns the packed columns of a slot, tensors whole, from all its parts in order.

    A tensor whose slices are placed in one memory stays there; any other is put together in memory of its own.

    Raises:
        ShardContentError: the slices of a tensor do not follow each other without gap to its announced size.
        LimitError: a tensor, or all of them, are larger than `limits` allows.
    """
    columns: list[Column] = []
    present = _present_bytes(parts)
    filling: _Filling | None = None
    total = 0
    for part in parts:
        decoded: list[Bytes | None] = []
        for column in part.columns:
            if not isinstance(column.value, TensorSlice):
                _finish(filling, columns)
                filling = None
                columns.append(column)
                decoded.append(None)
                continue
            if filling is None or not filling.continues_with(column):
                _finish(filling, columns)
                check_announced(part.slot, column.name, column.value, limits)
                _check_present(part.slot, column, column.value, present)
                total += column.value.total_bytes
                if total > limits.max_slot_bytes:
                    raise LimitError("max_slot_bytes", total, limits.max_slot_bytes)
                filling = _Filling(part.slot, column, column.value)
            decoded.append(filling.add(column.value, decoded))
    _finish(filling, columns)
    return columns


def decode_slice_into(out: Bytes, piece: TensorSlice, earlier: Sequence[Bytes | None]) -> None:
    """Fills `out` with the bytes of a slice.

    Args:
        out: contiguous, of the slice's announced and already capped size.
        piece: untrusted.
        earlier: what the columns before it in the same part were decoded to, None for a plain value.

    Raises:
        DecodeError: the slice is not what it says.
    """
    base = None if piece.base is None or not 0 <= piece.base < len(earlier) else earlier[piece.base]
    decompress_into(out, piece.codec, piece.data, item_bytes(piece.dtype), base)


def _present_bytes(parts: Sequence[SamplePart]) -> Counter[tuple[str, int]]:
    present: Counter[tuple[str, int]] = Counter()
    for part in parts:
        for column in part.columns:
            if isinstance(column.value, TensorSlice):
                present[column.name, column.leaf] += column.value.slice_bytes
    return present


def _check_present(slot: int, column: Column, announced: TensorSlice, present: Counter[tuple[str, int]]) -> None:
    # Before the tensor is allocated: one small slice must not cost as much as it says the tensor has.
    found = present[column.name, column.leaf]
    if found < announced.total_bytes:
        raise ShardContentError(slot, f"column {column.name!r} has {found} of {announced.total_bytes} bytes")


def check_announced(slot: int, name: str, announced: TensorSlice, limits: Limits) -> None:
    """Returns if a slice announces a tensor that can be, so that memory for it may be allocated.

    Raises:
        ShardContentError: it does not.
        LimitError: the tensor is larger than `limits` allows.
    """
    if announced.total_bytes > limits.max_tensor_bytes:
        raise LimitError("max_tensor_bytes", announced.total_bytes, limits.max_tensor_bytes)
    if announced.dtype != PACKED_VALUE and announced.dtype not in ITEM_BYTES:
        raise ShardContentError(slot, f"column {name!r} has the unknown dtype {announced.dtype[:40]!r}")
    # Before the product, which grows by a machine word with every dimension.
    if len(announced.shape) > MAX_DIMENSIONS:
        raise ShardContentError(slot, f"column {name!r} has {len(announced.shape)} dimensions")
    size = prod(announced.shape) * item_bytes(announced.dtype)
    if min(announced.shape, default=0) < 0 or size != announced.total_bytes:
        raise ShardContentError(slot, f"column {name!r}: shape {announced.shape} is not {announced.total_bytes} bytes")
    # An empty tensor has strides too, and torch refuses what overflows them.
    reach = prod(max(length, 1) for length in announced.shape) * item_bytes(announced.dtype)
    if reach > limits.max_tensor_bytes:
        raise LimitError("max_tensor_bytes", reach, limits.max_tensor_bytes)


class _Filling:
    """A tensor whose slices are being put together."""

    def __init__(self, slot: int, first: Column, announced: TensorSlice) -> None:
        self._slot, self._announced = slot, announced
        self._name, self._leaf = first.name, first.leaf
        self._place: memoryview | None = None
        if isinstance(announced, PlacedSlice) and len(announced.whole) == announced.total_bytes:
            self._place = announced.whole
        self._buffer = np.empty(0 if self._place is not None else announced.total_bytes, np.uint8)
        self._filled = 0

    def continues_with(self, column: Column) -> bool:
        return (column.name, column.leaf) == (self._name, self._leaf)

    @property
    def column(self) -> Column:
        return Column(
            self._name,
            self._leaf,
            TensorSlice(
                dtype=self._announced.dtype,
                shape=self._announced.shape,
                total_bytes=self._announced.total_bytes,
                offset=0,
                slice_bytes=self._announced.total_bytes,
                codec=RAW,
                data=self._place if self._place is not None else self._buffer.data,
            ),
        )

    def add(self, piece: TensorSlice, earlier: Sequence[Bytes | None]) -> Bytes:
        """Decodes the next slice into its place and returns that; `earlier` as in `decode_slice_into`."""
        same = (piece.dtype, piece.shape, piece.total_bytes)
        if same != (self._announced.dtype, self._announced.shape, self._announced.total_bytes):
            raise ShardContentError(self._slot, f"the slices of column {self._name!r} announce different tensors")
        end = piece.offset + piece.slice_bytes
        if piece.offset != self._filled or piece.slice_bytes < 0 or end > self._announced.total_bytes:
            raise ShardContentError(
                self._slot,
                f"column {self._name!r}: a slice covers bytes {piece.offset}..{end} where {self._filled} were "
                f"filled of {self._announced.total_bytes}",
            )
        if isinstance(piece, PlacedSlice) and piece.whole is self._place:
            decoded = np.frombuffer(piece.data, np.uint8)
        else:
            self._leave_place()
            decoded = self._buffer[piece.offset : end]
            decode_slice_into(decoded, piece, earlier)
        self._filled = end
        return decoded

    def _leave_place(self) -> None:
        """Goes on in memory of its own: one of the slices stands elsewhere."""
        if self._place is not None:
            self._buffer = np.empty(self._announced.total_bytes, np.uint8)
            self._buffer[: self._filled] = np.frombuffer(self._place, np.uint8, self._filled)
            self._place = None

    def check_filled(self) -> None:
        if self._filled != self._announced.total_bytes:
            raise ShardContentError(
                self._slot,
                f"column {self._name!r} has {self._filled} of {self._announced.total_bytes} bytes",
            )


def _finish(filling: _Filling | None, columns: list[Column]) -> None:
    if filling is not None:
        filling.check_filled()
        columns.append(filling.column)


def unpack_large_values(columns: Iterable[Column], limits: Limits = DEFAULT_LIMITS) -> list[Column]:
    """Inverse of `pack_large_values`.

    Raises:
        DecodeError: a packed value is corrupt or above `limits`.
    """
    return [
        Column(column.name, column.leaf, decode_value(bytes(column.value.data), limits))
        if isinstance(column.value, TensorSlice) and column.value.dtype == PACKED_VALUE
        else column
        for column in columns
    ]
