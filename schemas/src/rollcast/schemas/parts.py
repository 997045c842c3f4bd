"""Content of a slot to parts of bounded size, and back."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import xxhash

from rollcast.schemas.codec import RAW, compress, decompress_into
from rollcast.schemas.dtypes import ITEM_BYTES, PACKED_VALUE, item_bytes
from rollcast.schemas.errors import ContractError, LimitError, ShardContentError
from rollcast.schemas.events import Column, PlainValue, SamplePart, TensorSlice
from rollcast.schemas.framing import check_value, decode_value, encode_column, encode_value
from rollcast.schemas.limits import DEFAULT_LIMITS, DEFAULT_MAX_PART_BYTES, Limits

MIN_PART_BYTES = 16 * 1024
"""Smallest `max_part_bytes`: room for the identity, a long column name and some data."""

MAX_NAME_BYTES = DEFAULT_LIMITS.max_name_chars
"""Longest column name, encoded."""

MAX_DIMENSIONS = 64
"""Most dimensions of a tensor."""

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
        if isinstance(column.value, TensorSlice):
            header = replace(column.value, offset=0, slice_bytes=column.value.total_bytes, codec=RAW, data=b"")
            digest.update(encode_column(Column(column.name, column.leaf, header)))
            digest.update(column.value.data)
        else:
            digest.update(encode_column(column))
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
    groups: list[list[Column]] = [[]]
    used = _Size()
    for column, size in _pieces(columns, room):
        if groups[-1] and not (used + size).fits(room):
            groups.append([])
            used = _Size()
        groups[-1].append(column)
        used += size
    return [replace(slot, part=part, part_count=len(groups), columns=tuple(group)) for part, group in enumerate(groups)]


@dataclass(frozen=True, slots=True)
class _Size:
    encoded: int = 0
    plain: int = 0
    raw: int = 0

    def __add__(self, other: "_Size") -> "_Size":
        return _Size(self.encoded + other.encoded, self.plain + other.plain, self.raw + other.raw)

    def fits(self, room: int) -> bool:
        return self.encoded <= room and self.plain <= _MAX_PLAIN_BYTES_A_PART and self.raw <= _MAX_RAW_BYTES_A_PART


def _pieces(columns: Sequence[Column], room: int) -> Iterator[tuple[Column, _Size]]:
    for column in columns:
        if isinstance(column.value, TensorSlice):
            yield from _cut(column, column.value, room)
        else:
            size = len(encode_column(column))
            yield column, _Size(encoded=size, plain=size)


def _cut(column: Column, whole: TensorSlice, room: int) -> Iterator[tuple[Column, _Size]]:
    overhead = _SLICE_OVERHEAD_BYTES + len(column.name.encode()) + 10 * len(whole.shape)
    width = item_bytes(whole.dtype)
    step = min(_MAX_SLICE_BYTES, room - overhead) // width * width
    if step <= 0:
        raise ContractError(f"column {column.name!r} has {len(whole.shape)} dimensions: no part can hold its shape")
    data = memoryview(whole.data)
    for offset in range(0, whole.total_bytes, step) if whole.total_bytes else (0,):
        raw = data[offset : offset + step]
        codec, encoded = compress(raw, width)
        piece = replace(whole, offset=offset, slice_bytes=len(raw), codec=codec, data=encoded)
        # A column counts as one value too.
        yield Column(column.name, column.leaf, piece), _Size(overhead + len(encoded), 1, len(raw))


def join(parts: Sequence[SamplePart], limits: Limits = DEFAULT_LIMITS) -> list[Column]:
    """Returns the packed columns of a slot, tensors whole, from all its parts in order.

    Raises:
        ShardContentError: the slices of a tensor do not follow each other without gap to its announced size.
        LimitError: a tensor, or all of them, are larger than `limits` allows.
    """
    columns: list[Column] = []
    present = _present_bytes(parts)
    filling: _Filling | None = None
    total = 0
    for part in parts:
        for column in part.columns:
            if not isinstance(column.value, TensorSlice):
                _check_filled(filling)
                filling = None
                columns.append(column)
                continue
            if filling is None or not filling.continues_with(column):
                _check_filled(filling)
                _check_announced(part.slot, column.name, column.value, limits)
                _check_present(part.slot, column, column.value, present)
                total += column.value.total_bytes
                if total > limits.max_slot_bytes:
                    raise LimitError("max_slot_bytes", total, limits.max_slot_bytes)
                filling = _Filling(part.slot, column, column.value)
                columns.append(filling.column)
            filling.add(column.value)
    _check_filled(filling)
    return columns


def _check_announced(slot: int, name: str, announced: TensorSlice, limits: Limits) -> None:
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
        self._buffer = np.empty(announced.total_bytes, np.uint8)
        self._filled = 0
        whole = replace(announced, offset=0, slice_bytes=announced.total_bytes, codec=RAW, data=self._buffer.data)
        self.column = Column(first.name, first.leaf, whole)

    def continues_with(self, column: Column) -> bool:
        return (column.name, column.leaf) == (self.column.name, self.column.leaf)

    def add(self, piece: TensorSlice) -> None:
        same = (piece.dtype, piece.shape, piece.total_bytes)
        if same != (self._announced.dtype, self._announced.shape, self._announced.total_bytes):
            raise ShardContentError(self._slot, f"the slices of column {self.column.name!r} announce different tensors")
        end = piece.offset + piece.slice_bytes
        if piece.offset != self._filled or piece.slice_bytes < 0 or end > self._announced.total_bytes:
            raise ShardContentError(
                self._slot,
                f"column {self.column.name!r}: a slice covers bytes {piece.offset}..{end} where {self._filled} were "
                f"filled of {self._announced.total_bytes}",
            )
        decompress_into(self._buffer[piece.offset : end], piece.codec, piece.data, item_bytes(self._announced.dtype))
        self._filled = end

    def check_filled(self) -> None:
        if self._filled != self._announced.total_bytes:
            raise ShardContentError(
                self._slot,
                f"column {self.column.name!r} has {self._filled} of {self._announced.total_bytes} bytes",
            )


def _check_filled(filling: _Filling | None) -> None:
    if filling is not None:
        filling.check_filled()


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


def unpack_large_values(columns: Iterable[Column], limits: Limits = DEFAULT_LIMITS) -> list[Column]:
    """Inverse of `pack_large_values`.

    Raises:
        DecodeError: a packed value is corrupt or above `limits`.
    """
    return [
        Column(column.name, column.leaf, _unpacked(column.value.data, limits))
        if isinstance(column.value, TensorSlice) and column.value.dtype == PACKED_VALUE
        else column
        for column in columns
    ]


def _unpacked(data: bytes | memoryview, limits: Limits) -> PlainValue:
    return decode_value(bytes(data), limits)
