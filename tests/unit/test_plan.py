"""The plan of a shard: places in the file, and what is refused before anything is copied."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fixtures.rollouts import context_parallel_share, whole_shard
from rollcast.producer.context_parallel import ContextLayout, pieces_of, spans_of
from rollcast.producer.copy import copy_own, receive_from, send_own
from rollcast.producer.errors import RolloutDataError
from rollcast.producer.parallel import ParallelLayout
from rollcast.producer.plan import make_plan
from rollcast.schemas.events import SHARD_SLOT


def _layout(rank: int, size: int) -> ParallelLayout:
    return ParallelLayout(context_parallel_rank=rank, context_parallel_size=size)


def _share(rank: int, size: int, **changes: Any) -> dict[str, Any]:
    return context_parallel_share(whole_shard(0, 0, 1), rank, size) | changes


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("cut", ContextLayout)
def test_the_copies_of_all_peers_fill_the_file_without_overlap(size: int, in_place: bool, cut: ContextLayout) -> None:
    shares = [context_parallel_share(whole_shard(0, 0, 1), rank, size, cut) for rank in range(size)]
    plans = [
        make_plan(share, _layout(rank, size), context_layout=cut, in_place=in_place)
        for rank, share in enumerate(shares)
    ]
    assert len({plan.digest for plan in plans}) == 1
    assert len({plan.data_bytes for plan in plans}) == 1
    filled = torch.zeros(plans[0].data_bytes, dtype=torch.int32)
    for rank, plan in enumerate(plans):
        for _, target, _, length in plan.records.segments(rank).as_tuples():
            filled[target : target + length] += 1
    # Only the first token of the two samples without a prompt is held by nobody, in four fields.
    unfilled = 0 if size == 1 else 2 * (2 + 4 + 12 + 8)
    assert filled.max() == 1
    assert int((filled == 0).sum()) == unfilled


@given(
    lengths=st.lists(st.integers(1, 60).flatmap(lambda total: st.tuples(st.just(total), st.integers(0, total)))),
    cut=st.sampled_from(ContextLayout),
    size=st.sampled_from([1, 2, 3, 4]),
)
def test_slicing_and_restoring_are_inverse(lengths: list[tuple[int, int]], cut: ContextLayout, size: int) -> None:
    whole = [torch.arange(1, response + 1, dtype=torch.int64) for _, response in lengths]
    for tensor, (total, response) in zip(whole, lengths, strict=True):
        if size > 1 and total == response and response:
            tensor[0] = 0
    pieces = [pieces_of(cut, size, total, response, 64) for total, response in lengths]
    restored: torch.Tensor | None = None
    for rank in range(size):
        share = {
            "response_lengths": [response for _, response in lengths],
            "total_lengths": [total for total, _ in lengths],
            "max_seq_lens": [64] * len(lengths),
            "values": [
                torch.cat([tensor[low:high] for low, high in spans_of(rank, held)] or [tensor[:0]])
                for tensor, held in zip(whole, pieces, strict=True)
            ],
        }
        plan = make_plan(share, _layout(rank, size), context_layout=cut)
        restored = torch.zeros(plan.data_bytes, dtype=torch.uint8) if restored is None else restored
        copy_own(plan, rank, restored)
    assert restored is not None
    assert torch.equal(restored.view(torch.int64), torch.cat([*whole, torch.empty(0, dtype=torch.int64)]))


def test_a_rank_that_cannot_read_its_tensors_still_sends_every_message_and_says_so() -> None:
    plans = [make_plan(_share(rank, 2), _layout(rank, 2), in_place=False) for rank in range(2)]
    sources = tuple(
        torch.empty_like(source, device="meta") if number % 3 == 0 else source
        for number, source in enumerate(plans[1].sources)
    )
    messages: list[torch.Tensor] = []
    with pytest.raises(NotImplementedError):
        send_own(replace(plans[1], sources=sources), 1, messages.append, 100)

    def receive(buffer: torch.Tensor) -> None:
        buffer.copy_(messages.pop(0))

    data = torch.zeros(plans[0].data_bytes, dtype=torch.uint8)
    assert not receive_from(plans[0], 1, receive, data, 100)
    assert not messages


def test_the_digest_tells_fields_dtypes_lengths_and_counts_apart() -> None:
    base = _share(0, 1)
    variants = [
        base,
        {name: value for name, value in base.items() if name != "entropy"},
        base | {"entropy": [tensor.float() for tensor in base["entropy"]]},
        base | {"tokens": [tensor[:-1] for tensor in base["tokens"]]},
        {name: value[:-1] if isinstance(value, list) else value for name, value in base.items()},
    ]
    assert len({make_plan(data, _layout(0, 1)).digest for data in variants}) == len(variants)


def test_the_records_hold_no_reference_to_the_trainers_memory() -> None:
    notes = ["before"]
    plan = make_plan(_share(0, 1, notes=notes), _layout(0, 1))
    notes[0] = "after"
    values = {column.name: column.plain for column in plan.records.columns}
    assert values["notes"][SHARD_SLOT] == ["before"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": [torch.zeros(1)]}, "'tokens' has 1 entries for 7 samples"),
        ({"loss_masks": []}, "'loss_masks' has 0 entries for 7 samples"),
        ({"log_probs": [torch.zeros(1)]}, "'log_probs' needs one tensor per sample: it has 1, for 7 samples"),
        ({"log_probs": torch.zeros(7)}, r"'log_probs' of sample 0 has shape \(\)"),
        ({"log_probs": "text"}, "'log_probs' needs one tensor per sample: it has a str"),
        ({"n" * 1025: 1}, "longer than 1024 bytes"),
        ({"deep": [torch.zeros([1] * 65)] * 7}, "'deep' has 65 dimensions"),
        ({"partition": [0]}, "'partition' has 1 entries for 7 samples"),
        ({"response_lengths": None}, "no 'response_lengths' column"),
        ({"total_lengths": [1] * 7}, "response_length 6 is not within total_length 1"),
        ({"total_lengths": None}, "'total_lengths' is absent"),
        ({"entropy": [torch.zeros(99)] * 7}, "this rank .context-parallel 1 of 2. holds"),
    ],
)
def test_a_misaligned_column_is_one_sentence_with_name_and_counts(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RolloutDataError, match=words):
        make_plan(_share(1, 2, **changes), _layout(1, 2))


def test_an_entry_that_is_no_tensor_is_a_type_error() -> None:
    log_probs: list[Any] = list(_share(0, 1)["log_probs"])
    log_probs[3] = None
    with pytest.raises(TypeError, match="sample 3 is a NoneType"):
        make_plan(_share(0, 1, log_probs=log_probs), _layout(0, 1))
