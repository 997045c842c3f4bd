"""Room for the tensors of unfinished rollouts in mapped files, so that memory does not grow with a rollout."""

import contextlib
import errno
import os
import sys
import tempfile
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollcast.consumer.errors import ScratchFullError
from rollcast.consumer.rollout import RolloutId
from rollcast.schemas import Column, LimitError, Limits, SamplePart, ShardContentError, TensorSlice
from rollcast.schemas.codec import RAW, compress
from rollcast.schemas.dtypes import item_bytes
from rollcast.schemas.joining import PlacedSlice, check_announced, decode_slice_into

_FIRST_SEGMENT_BYTES = 1024 * 1024
_LARGEST_SEGMENT_BYTES = 64 * 1024 * 1024
_MOST_SPARES = 32
_PAGE_BYTES = 4096
_ALIGNMENT = 64

_Bytes = npt.NDArray[np.uint8]


class Scratch:
    """Decodes the tensor slices of parts to their place among the bytes of their tensor, which lie in mapped files.

    Space is given back by the references to it: a part with placed slices, and whatever is made of them, keeps the
    file that they lie in; without any the file is gone, but for some, up to 2 GiB, that are used again. A file never
    has a name, so a crash leaves nothing. Its blocks are reserved before it is written to: a full disk is an `OSError`,
    not a signal.

    A byte is written once, so a repeat changes nothing that is there. For one thread at a time, `forget` and
    `give_up_spares` apart.

    Args:
        directory: where the files are.
        max_bytes: cap on their size, all together.
        limits: caps on what a slice may announce.
    """

    def __init__(self, directory: Path, max_bytes: int, limits: Limits) -> None:
        self._directory, self._max_bytes, self._limits = directory, max_bytes, limits
        self._rollouts: weakref.WeakValueDictionary[RolloutId, _Space] = weakref.WeakValueDictionary()
        self._segments: dict[object, int] = {}
        # Pages that were written before: new ones would cost a fault each.
        self._spares: list[_Bytes] = []

    @property
    def used_bytes(self) -> int:
        """Size of the files that are in use."""
        # Finalizers change it in any thread; list() is one step for them.
        return sum(list(self._segments.values()))

    def open(self) -> None:
        """Checks that the directory can be used, and makes it if it is not there.

        Raises:
            OSError: it cannot.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        self.segment(_PAGE_BYTES)

    def forget(self) -> None:
        """Has nothing that comes from now on share a place with what came before."""
        self._rollouts = weakref.WeakValueDictionary()

    def give_up_spares(self) -> None:
        """Gives the disk back what nothing stands in: dumps are often kept on the same one."""
        self._spares.clear()

    def place(self, part: SamplePart, *, apart: bool = False) -> SamplePart:
        """Returns the part with its slices decoded and placed.

        Args:
            part: of a rollout.
            apart: each slice alone, in files that nothing else shares; for what may be a repeat.

        Raises:
            ContractError: a slice is corrupt, or announces what cannot be or what is too large.
            ScratchFullError: there is no room now.
            OSError: the disk is full, or cannot be used.
        """
        slices = [(column, column.value) for column in part.columns if isinstance(column.value, TensorSlice)]
        if not slices:
            return part
        for column, piece in slices:
            check_announced(part.slot, column.name, piece, self._limits)
            if not 0 <= piece.offset <= piece.offset + piece.slice_bytes <= piece.total_bytes:
                raise ShardContentError(part.slot, f"column {column.name!r}: a slice lies outside of its tensor")
        needed = sum(_pages(piece.total_bytes) for _, piece in slices)
        # So it can always be placed once everything else is gone, however segments are cut.
        if needed > self._max_bytes // 4:
            raise LimitError("the room that a part takes", needed, self._max_bytes // 4)
        identity = RolloutId(part.run_id, part.attempt, part.rollout_id, part.stream)
        rollouts = self._rollouts
        # Apart it takes what it needs, and no segment that others could share.
        own_bytes = sum(_pages(piece.slice_bytes) for _, piece in slices)
        space = _Space(self, own_bytes) if apart else rollouts.get(identity)
        if space is None:
            space = rollouts[identity] = _Space(self, _FIRST_SEGMENT_BYTES)
        columns: list[Column] = []
        decoded: list[_Bytes | None] = []
        for column in part.columns:
            if isinstance(column.value, TensorSlice):
                tensor = None if apart else space.tensor(part, column, column.value)
                placed = _placed(space, tensor, column.value, decoded)
                columns.append(Column(sys.intern(column.name), column.leaf, placed))
                decoded.append(np.frombuffer(placed.data, np.uint8))
            else:
                columns.append(column)
                decoded.append(None)
        return replace(part, columns=tuple(columns))

    def segment(self, size: int) -> _Bytes:
        """Returns new memory of at least that size, which is a file's.

        Raises:
            ScratchFullError: there is no room now.
            OSError: the disk is full, or cannot be used.
        """
        size = _pages(size)
        if size == _LARGEST_SEGMENT_BYTES:
            with contextlib.suppress(IndexError):
                return self._lent(self._spares.pop())
        if self.used_bytes + len(self._spares) * _LARGEST_SEGMENT_BYTES + size > self._max_bytes:
            self._spares.clear()
        if self.used_bytes + size > self._max_bytes:
            raise ScratchFullError(size, self.used_bytes, self._max_bytes)
        # Somebody may have removed it since.
        self._directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._directory, prefix=".rollcast-scratch-") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as exc:
                is_full = exc.errno in {errno.ENOSPC, errno.EDQUOT}
                if is_full and self._spares:
                    self._spares.clear()
                    return self.segment(size)
                # Where giving up a rollout helps, the disk is as good a limit as the configured one.
                if not is_full or not self._segments:
                    raise
                raise ScratchFullError(size, self.used_bytes, self.used_bytes) from exc
            # Unlike a mapping of the mmap module, this one needs no open file.
            path = f"/proc/self/fd/{file.fileno()}"
            try:
                mapped: _Bytes = torch.from_file(path, shared=True, size=size, dtype=torch.uint8).numpy()
            except RuntimeError as exc:
                # The system allows a process so many mappings and no more.
                raise ScratchFullError(size, self.used_bytes, self.used_bytes) from exc
        return self._lent(mapped)

    def _lent(self, mapped: _Bytes) -> _Bytes:
        # By way of a memoryview, so that what numpy makes of it refers to it, not to `mapped`.
        memory: _Bytes = np.frombuffer(mapped.data, np.uint8)
        token = object()
        self._segments[token] = len(mapped)
        weakref.finalize(memory, self._take_back, token, mapped).atexit = False
        return memory

    def _take_back(self, token: object, mapped: _Bytes) -> None:
        # In any thread, at any time: steps that need no lock.
        del self._segments[token]
        if len(mapped) == _LARGEST_SEGMENT_BYTES and len(self._spares) < _MOST_SPARES:
            self._spares.append(mapped)


def _placed(
    space: "_Space", tensor: "_Tensor | None", piece: TensorSlice, earlier: Sequence[_Bytes | None]
) -> PlacedSlice:
    """Returns the slice, decoded to its place in the tensor; without one, or where that place is filled, alone."""
    start, end = piece.offset, piece.offset + piece.slice_bytes
    if tensor is None or not tensor.is_free(start, end):
        # A repeat, or a slot in which two slices claim the same bytes: it must not change what is there.
        tensor = _Tensor(space.take(piece.slice_bytes), space)
        start, end = 0, piece.slice_bytes
    whole = end - start == len(tensor.memory)
    data = tensor.memory if whole else tensor.memory[start:end]
    decode_slice_into(np.frombuffer(data, np.uint8), piece, earlier)
    tensor.fill(start, end)
    return PlacedSlice(
        dtype=sys.intern(piece.dtype),
        shape=piece.shape,
        total_bytes=piece.total_bytes,
        offset=piece.offset,
        slice_bytes=piece.slice_bytes,
        codec=RAW,
        data=data,
        whole=tensor.memory,
        encoded_bytes=len(piece.data),
        # Nothing else comes for a whole tensor, and there are many of them.
        owner=space if whole else tensor,
    )


def unplaced(part: SamplePart) -> SamplePart:
    """Returns the part as a producer sends it: its slices encoded, and in memory."""
    return replace(part, columns=tuple(_unplaced(column) for column in part.columns))


def _unplaced(column: Column) -> Column:
    placed = column.value
    if not isinstance(placed, PlacedSlice):
        return column
    codec, data = compress(placed.data, item_bytes(placed.dtype))
    piece = placed.another(offset=placed.offset, slice_bytes=placed.slice_bytes, codec=codec, data=bytes(data))
    return Column(column.name, column.leaf, piece)


def _pages(size: int) -> int:
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES


class _Space:
    """What is placed of one rollout: segments of growing size, filled one after the other."""

    def __init__(self, scratch: Scratch, first_bytes: int) -> None:
        self._scratch = scratch
        self._tensors: weakref.WeakValueDictionary[Any, _Tensor] = weakref.WeakValueDictionary()
        self._segment: _Bytes = np.empty(0, np.uint8)
        self._used = 0
        self._next_bytes = first_bytes

    def tensor(self, part: SamplePart, column: Column, piece: TensorSlice) -> "_Tensor":
        """Returns the place of a slice's tensor."""
        if piece.slice_bytes == piece.total_bytes:
            return _Tensor(self.take(piece.total_bytes), self)
        # Two cuts of a slot have places of their own, and so have slices that announce different tensors.
        slot = (part.data_parallel_rank, part.slot, part.part_count)
        key = (*slot, column.name, column.leaf, piece.dtype, piece.shape, piece.total_bytes)
        tensor = self._tensors.get(key)
        if tensor is None:
            tensor = self._tensors[key] = _Tensor(self.take(piece.total_bytes), self)
        return tensor

    def take(self, size: int) -> memoryview:
        """Returns memory that nobody else has."""
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if start + size <= len(self._segment):
            self._used = start + size
            return self._segment.data[start : start + size]
        if size >= self._next_bytes:
            return self._scratch.segment(size).data[:size]
        try:
            self._segment = self._scratch.segment(self._next_bytes)
        except ScratchFullError:
            return self._scratch.segment(size).data[:size]
        self._next_bytes = min(2 * self._next_bytes, _LARGEST_SEGMENT_BYTES)
        self._used = size
        return self._segment.data[:size]


class _Tensor:
    """The place of one tensor, and which of its bytes are filled.

    Attributes:
        memory: its bytes.
    """

    __slots__ = ("__weakref__", "_edges", "_space", "memory")

    def __init__(self, memory: memoryview, space: _Space) -> None:
        self.memory = memory
        # Lives as long as something is placed in it.
        self._space = space
        self._edges: list[int] = []

    def is_free(self, start: int, end: int) -> bool:
        """Returns whether none of these bytes is filled."""
        at = bisect_right(self._edges, start)
        return start == end or (at % 2 == 0 and at == bisect_left(self._edges, end))

    def fill(self, start: int, end: int) -> None:
        """Notes that these bytes, which were free, are filled."""
        if start == end:
            return
        at = bisect_right(self._edges, start)
        # Neighbours become one, so that slices in order leave two edges, however many they are.
        joins_left = at > 0 and self._edges[at - 1] == start
        joins_right = at < len(self._edges) and self._edges[at] == end
        edges = [start] * (not joins_left) + [end] * (not joins_right)
        self._edges[at - joins_left : at + joins_right] = edges
