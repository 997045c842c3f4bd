"""The order in which context-parallel ranks fill a split column, and the way from there to its final order.

A rank holds several runs of tokens of each response. Copied to its final place each, they would take a call for every
64 KiB, on the training thread. So a rank copies what it holds of many samples side by side, in one call, and before the
bundle is committed a background thread puts the runs where they belong.
"""

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from rollcast.producer.cuts import Cuts, IntArray
from rollcast.producer.errors import SpoolError

# What is put in order at a time, and held in memory meanwhile; a larger sample alone.
_BLOCK_BYTES = 16 * 1024 * 1024
_MOST_PIECES = os.sysconf("SC_IOV_MAX")


class Run(NamedTuple):
    """Tensors of a column that a rank copies side by side.

    Attributes:
        first: the first one.
        last: the one behind the last.
        start: offset of the first byte in the data of the tensor file.
        end: offset behind the last.
    """

    first: int
    last: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RankOrder:
    """Where the ranks put what they hold of a split column; places are bytes from its first one.

    The column consists of blocks of whole samples. In a block the ranks follow each other, and behind them the room
    for what no rank holds.

    Attributes:
        cuts: of the responses.
        row_bytes: of a token, by sample.
        starts: where what a rank holds of a sample begins, by rank (last: what none holds) and sample.
        sizes: how many bytes that is.
        blocks: first sample and the one behind the last of each block.
    """

    cuts: Cuts
    row_bytes: IntArray
    starts: IntArray
    sizes: IntArray
    blocks: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, cuts: Cuts, sizes: Sequence[int]) -> "RankOrder":
        """Returns the order of a column of tensors with these sizes, one for each response."""
        whole = np.array(sizes, np.int64)
        begins = np.cumsum(whole) - whole
        row_bytes = whole // np.maximum(cuts.responses, 1)
        held = cuts.held * row_bytes
        firsts = np.flatnonzero(np.diff(begins // _BLOCK_BYTES, prepend=-1)).tolist()
        blocks = tuple(pairwise([*firsts, len(whole)]))
        starts = np.empty_like(held)
        for first, last in blocks:
            block = held[:, first:last]
            starts[:, first:last] = begins[first] + (np.cumsum(block) - block.ravel()).reshape(block.shape)
        return cls(cuts, row_bytes, starts, held, blocks)

    def runs(self, rank: int, column_at: int) -> list[Run]:
        """Returns what a rank copies, a run for each block.

        Args:
            rank: context-parallel rank.
            column_at: where the column begins.
        """
        starts, ends = self.starts[rank] + column_at, self.starts[rank] + self.sizes[rank] + column_at
        return [Run(first, last, int(starts[first]), int(ends[last - 1])) for first, last in self.blocks]

    @property
    def largest_block(self) -> int:
        """Size of the largest block in bytes."""
        return max((self._block_bytes(*block) for block in self.blocks), default=0)

    def _block_bytes(self, first: int, last: int) -> int:
        return int(self.sizes[:, first:last].sum())

    def put_in_order(self, descriptor: int, column_at: int, room: memoryview) -> None:
        """Puts a column that all ranks have filled in its final order, with zeros for what no rank holds.

        Args:
            descriptor: of its file.
            column_at: where the column begins in the file.
            room: for the largest block.

        Raises:
            OSError: the disk does not take it.
            SpoolError: the file is too short.
        """
        targets, sources, sizes = self._runs()
        for first, last in self.blocks:
            begin, size = int(self.starts[0, first]), self._block_bytes(first, last)
            block = room[:size]
            _read(descriptor, block, column_at + begin)
            nobodys = int(self.starts[-1, first]) - begin
            block[nobodys:] = bytes(size - nobodys)
            inside = slice(*np.searchsorted(targets, (begin, begin + size)))
            starts = sources[inside] - begin
            ends = starts + sizes[inside]
            pieces = (block[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True))
            _write(descriptor, deque(pieces), column_at + begin)

    def _runs(self) -> tuple[IntArray, IntArray, IntArray]:
        """Returns the final place, the present place and the size of each run, by final place."""
        whole = self.sizes.sum(axis=0)
        begins = np.cumsum(whole) - whole
        found = []
        for rank, starts in enumerate(self.starts):
            samples, first, held, tokens = self.cuts.runs(rank)
            row_bytes = self.row_bytes[samples]
            runs = [begins[samples] + first * row_bytes, starts[samples] + held * row_bytes, tokens * row_bytes]
            found.append(np.stack(runs)[:, tokens * row_bytes > 0])
        runs_of_all = np.concatenate(found, axis=1)
        targets, sources, sizes = runs_of_all[:, runs_of_all[0].argsort()]
        return targets, sources, sizes


def _read(descriptor: int, room: memoryview, at: int) -> None:
    # The kernel moves less than 2 GiB in one call.
    while room:
        moved = os.preadv(descriptor, [room], at)
        if not moved:
            raise SpoolError(f"a tensor file ends at byte {at}, {len(room)} bytes before it should")
        room, at = room[moved:], at + moved


def _write(descriptor: int, pieces: deque[memoryview], at: int) -> None:
    while pieces:
        moved = os.pwritev(descriptor, [*islice(pieces, _MOST_PIECES)], at)
        at += moved
        while pieces and moved >= len(pieces[0]):
            moved -= len(pieces.popleft())
        if moved:
            pieces[0] = pieces[0][moved:]
