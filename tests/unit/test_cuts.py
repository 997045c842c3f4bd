"""The responses of a whole shard are cut as each of them alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollcast.producer.context_parallel import ContextLayout, pieces_of
from rollcast.producer.cuts import Cuts
from rollcast.producer.errors import RolloutDataError

_LENGTHS = st.integers(0, 400).flatmap(
    lambda total: st.tuples(st.just(total), st.integers(0, total), st.integers(total, total + 50))
)


def _cuts(layout: ContextLayout, size: int, lengths: list[tuple[int, int, int]]) -> Cuts:
    return Cuts(layout, size, *np.array(lengths, np.int64).reshape(-1, 3).T)


@given(layout=st.sampled_from(ContextLayout), size=st.sampled_from([1, 2, 3, 4, 8]), lengths=st.lists(_LENGTHS))
def test_the_cuts_of_a_shard_are_those_of_its_samples(
    layout: ContextLayout, size: int, lengths: list[tuple[int, int, int]]
) -> None:
    if layout is not ContextLayout.ZIGZAG_BSHD:
        lengths = [(total, response, total) for total, response, _ in lengths]
    cuts = _cuts(layout, size, lengths)
    pieces = [pieces_of(layout, size, *sample) for sample in lengths]
    for rank, wanted in enumerate((*range(size), None)):
        expected = []
        for number, sample in enumerate(pieces):
            reached = held = 0
            for tokens, holder in sample:
                if holder == wanted and tokens:
                    expected.append([number, reached, held, tokens])
                    held += tokens
                reached += tokens
        assert [run for run in cuts.runs(rank).T.tolist() if run[3]] == expected
        held_tokens = [sum(tokens for tokens, holder in sample if holder == wanted) for sample in pieces]
        assert cuts.held[rank].tolist() == held_tokens


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ((8, 9, 8), "response_length 9 is not within total_length 8"),
        ((8, -1, 8), "response_length -1 is not within"),
        ((8, 3, 7), "at least total_length 8, not 7"),
    ],
)
def test_one_sample_whose_lengths_contradict_each_other_is_refused(sample: tuple[int, int, int], words: str) -> None:
    with pytest.raises(RolloutDataError, match=words):
        _cuts(ContextLayout.ZIGZAG_BSHD, 2, [(8, 3, 8), sample])
