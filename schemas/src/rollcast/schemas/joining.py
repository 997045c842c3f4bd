"""Content of a slot again, from its parts."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from rollcast.schemas.codec import RAW, Bytes, decompress_into
from rollcast.schemas.dtypes import ITEM_BYTES, PACKED_VALUE, item_bytes
from rollcast.schemas.errors import LimitError, ShardContentError
from rollcast.schemas.events import Column, SamplePart, TensorSlice
from rollcast.schemas.framing import decode_value
from rollcast.schemas.limits import DEFAULT_LIMITS, Limits
from rollcast.schemas.parts import MAX_DIMENSIONS


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
    present: Counter[tuple[str, int]] | None = None
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
                filling = None
                check_announced(part.slot, column.name, column.value, limits)
                total += column.value.total_bytes
                if total > limits.max_slot_bytes:
                    raise LimitError("max_slot_bytes", total, limits.max_slot_bytes)
                if _is_whole(column.value):
                    columns.append(column)
                    decoded.append(np.frombuffer(column.value.data, np.uint8))
                    continue
                present = _present_bytes(parts) if present is None else present
                _check_present(part.slot, column, column.value, present)
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


def _is_whole(piece: TensorSlice) -> bool:
    """Returns whether a slice is all of its tensor, and stands decoded in its memory already."""
    return isinstance(piece, PlacedSlice) and piece.slice_bytes == piece.total_bytes == len(piece.whole)


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
        data = self._place if self._place is not None else self._buffer.data
        whole = self._announced.another(offset=0, slice_bytes=self._announced.total_bytes, codec=RAW, data=data)
        return Column(self._name, self._leaf, whole)

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
