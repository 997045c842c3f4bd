"""How context parallelism cuts the responses of a whole shard: `pieces_of` for all samples at once.

As arrays, because the training thread has no time for a loop over the samples.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rollcast.producer.context_parallel import ContextLayout, pieces_of

IntArray: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Cuts:
    """The cuts of a shard's responses; one rank alone holds them whole.

    Attributes:
        layout: how a sequence is cut.
        size: number of context-parallel ranks.
        totals: prompt and response of each sample, in tokens.
        responses: response of each sample, in tokens.
        padded: the length that sizes the chunks of each sample, in tokens.

    Raises:
        RolloutDataError: lengths that contradict each other.
    """

    layout: ContextLayout
    size: int
    totals: IntArray
    responses: IntArray
    padded: IntArray

    def __post_init__(self) -> None:
        wrong = (self.responses < 0) | (self.responses > self.totals) | (self.totals > self.padded)
        if wrong.any():
            lengths = (int(array[wrong][0]) for array in (self.totals, self.responses, self.padded))
            pieces_of(self.layout, self.size, *lengths)

    @cached_property
    def held(self) -> IntArray:
        """Number of response tokens held, by rank (last: those that no rank holds) and sample."""
        held = np.array([self._chunks(rank)[1].sum(axis=0) for rank in range(self.size)], np.int64)
        return np.vstack([held, self.responses - held.sum(axis=0)])

    def runs(self, rank: int) -> IntArray:
        """Returns the runs of response tokens that a rank holds, by sample, in the order in which it holds them.

        Args:
            rank: `size` for the tokens that no rank holds.

        Returns:
            Four rows: sample, first token in the response, first token in what the rank holds, number of tokens.
        """
        if rank == self.size:
            # Without a prompt no logit predicts the first token; all others are held.
            tokens = self.held[rank:]
            first = np.zeros_like(tokens)
        else:
            first, tokens = self._chunks(rank)
        samples = np.broadcast_to(np.arange(len(self.totals)), tokens.shape)
        held = np.cumsum(tokens, axis=0) - tokens
        return np.stack([samples, first, held, tokens]).transpose(0, 2, 1).reshape(4, -1)

    def _chunks(self, rank: int) -> tuple[IntArray, IntArray]:
        """Returns first response token and number of tokens, by chunk of the rank and sample."""
        if self.size == 1:
            return np.zeros((1, len(self.responses)), np.int64), self.responses[np.newaxis]
        chunks = self.size if self.layout is ContextLayout.CONTIGUOUS else 2 * self.size
        if self.layout is ContextLayout.CONTIGUOUS:
            own = [[rank, rank + 1]]
        elif rank == self.size - 1:
            # Its two chunks are neighbours.
            own = [[rank, rank + 2]]
        else:
            own = [[rank, rank + 1], [chunks - 1 - rank, chunks - rank]]
        edges = np.array(own)[:, :, np.newaxis] * -(-self.padded // chunks)
        # A response token belongs to the logit that predicts it.
        first = self.totals - self.responses - 1
        edges = np.clip(edges, np.maximum(first, 0), self.totals - 1)
        return edges[:, 0] - first, edges[:, 1] - edges[:, 0]
