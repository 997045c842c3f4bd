"""Which response tokens each context-parallel rank holds."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollcast.producer import get_logits_and_tokens_offset_with_cp, restore_context_parallel_fields_to_cpu
from rollcast.producer.context_parallel import ContextLayout, pieces_of, response_spans, spans_of
from rollcast.producer.errors import RolloutDataError


def _held(total: int, response: int, rank: int, size: int) -> list[int]:
    return [token for low, high in response_spans(total, response, rank, size) for token in range(low, high)]


@pytest.mark.parametrize(
    ("total", "response", "held"),
    [
        (8, 6, [[0, 5], [1, 2, 3, 4]]),
        (16, 2, [[0, 1], []]),
        (4, 0, [[], []]),
        (7, 3, [[], [0, 1, 2]]),
    ],
)
def test_two_ranks_hold_the_outer_and_the_inner_chunks(total: int, response: int, held: list[list[int]]) -> None:
    assert [_held(total, response, rank, 2) for rank in range(2)] == held


def test_contiguous_ranks_hold_one_run_each() -> None:
    assert pieces_of(ContextLayout.CONTIGUOUS, 2, 10, 8) == ((4, 0), (4, 1))


@given(
    layout=st.sampled_from(ContextLayout),
    total=st.integers(1, 400),
    part=st.floats(0, 1),
    size=st.sampled_from([1, 2, 3, 4, 8]),
    padding=st.integers(0, 50),
)
def test_the_ranks_together_hold_each_token_once(
    layout: ContextLayout, total: int, part: float, size: int, padding: int
) -> None:
    response = int(total * part)
    pieces = pieces_of(layout, size, total, response, total + padding)
    assert sum(tokens for tokens, _ in pieces) == response
    spans = [spans_of(rank, pieces) for rank in range(size)]
    together = sorted(token for held in spans for low, high in held for token in range(low, high))
    # Without a prompt there is no logit before the first token, so with context parallelism nobody holds it.
    first = 1 if size > 1 and response == total else 0
    assert together == list(range(first, response))


@given(
    total=st.integers(1, 400),
    part=st.floats(0, 1),
    size=st.sampled_from([2, 3, 4, 8]),
    padding=st.integers(0, 50),
    qkv_format=st.sampled_from(["thd", "bshd"]),
)
def test_the_pieces_are_those_of_the_two_chunks_of_each_rank(
    total: int, part: float, size: int, padding: int, qkv_format: str
) -> None:
    response = int(total * part)
    first = total - response - 1
    pieces = pieces_of(ContextLayout(f"zigzag-{qkv_format}"), size, total, response, total + padding)
    for rank in range(size):
        _, _, logits, _ = get_logits_and_tokens_offset_with_cp(total, response, qkv_format, total + padding, rank, size)
        tokens = [logit - first for low, high in logits for logit in range(low, high)]
        assert [token for low, high in spans_of(rank, pieces) for token in range(low, high)] == tokens


def test_a_padded_length_below_the_sequence_is_refused() -> None:
    with pytest.raises(RolloutDataError, match="at least total_length 8, not 7"):
        pieces_of(ContextLayout.ZIGZAG_BSHD, 2, 8, 3, 7)


def test_offsets_are_those_of_the_two_chunks() -> None:
    assert get_logits_and_tokens_offset_with_cp(8, 6, cp_rank=0, cp_size=2) == (
        2,
        ((0, 2), (6, 8)),
        ((1, 2), (6, 7)),
        ((2, 3), (7, 8)),
    )
    assert get_logits_and_tokens_offset_with_cp(16, 2, cp_rank=1, cp_size=2)[2:] == (((0, 0), (0, 0)), ((0, 0), (0, 0)))
    chunk_size, chunks, _, _ = get_logits_and_tokens_offset_with_cp(8, 6, "bshd", 12, cp_rank=1, cp_size=2)
    assert (chunk_size, chunks) == (3, ((3, 6), (6, 9)))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"cp_size": 1}, "cp_size is 1"),
        ({"response_length": 9}, "not within total_length 8"),
        ({"qkv_format": "sbhd"}, "sbhd"),
        ({"qkv_format": "bshd"}, "max_seq_len None"),
    ],
)
def test_lengths_and_formats_that_make_no_sense_are_refused(arguments: dict[str, object], words: str) -> None:
    given_arguments = {"total_length": 8, "response_length": 6, "cp_rank": 0, "cp_size": 2} | arguments
    with pytest.raises(RolloutDataError, match=words):
        get_logits_and_tokens_offset_with_cp(**given_arguments)  # type: ignore[arg-type]  # parametrised


def _identity(tensor: torch.Tensor, _total: int, _response: int) -> torch.Tensor:
    return tensor


def test_the_restore_detaches_copies_and_leaves_the_input_alone() -> None:
    log_probs = torch.zeros(2, requires_grad=True)
    image = {"x": torch.ones(1)}
    data: dict[str, Any] = {
        "response_lengths": [2],
        "total_lengths": [3],
        "log_probs": [log_probs],
        "images": [image],
    }
    restored = restore_context_parallel_fields_to_cpu(data, _identity, keep_restored=True)
    assert restored is not None
    assert not restored["log_probs"][0].requires_grad
    assert restored["log_probs"][0].data_ptr() != log_probs.data_ptr()
    assert restored["images"][0]["x"].data_ptr() != image["x"].data_ptr()
    assert data["log_probs"][0] is log_probs
    assert list(restored) == list(data)


def test_the_restore_keeps_nothing_where_it_is_not_wanted() -> None:
    data = {"response_lengths": [1], "total_lengths": [1], "kl": [torch.zeros(1)]}
    assert restore_context_parallel_fields_to_cpu(data, _identity, keep_restored=False) is None


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"kl": [torch.zeros(2)]}, ValueError, "one tensor per sample: it has 1, for 2 samples"),
        ({"kl": [torch.zeros(2), None]}, TypeError, "sample 1 is a NoneType"),
        ({"total_lengths": [2]}, ValueError, "'total_lengths' is 1 long"),
        ({"kl": [torch.zeros(2), torch.zeros(3)]}, ValueError, "sample 1 has 3 entries"),
    ],
)
def test_misaligned_fields_are_named_with_their_counts(
    change: dict[str, object], error: type[Exception], words: str
) -> None:
    data = {"response_lengths": [2, 2], "total_lengths": [2, 2], "kl": [torch.zeros(2), torch.zeros(2)]} | change
    with pytest.raises(error, match=words):
        restore_context_parallel_fields_to_cpu(data, _identity, keep_restored=True)
