"""The plan of a shard: places in the file, and what is refused before anything is copied."""

import os
from dataclasses import replace
from tempfile import TemporaryFile
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
from rollcast.producer.plan import ShardRecords, make_plan
from rollcast.producer.rank_order import RankOrder
from rollcast.schemas.events import SHARD_SLOT
from rollcast.schemas.tensors import tensor_bytes


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
        for _, target, length in plan.records.copies(rank).each():
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
    plans = []
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
        plans.append(make_plan(share, _layout(rank, size), context_layout=cut))
    filled = torch.full((plans[0].data_bytes,), 255, dtype=torch.uint8)
    for rank, plan in enumerate(plans):
        copy_own(plan, rank, filled)
    restored = _in_order(filled, plans[0].records)
    assert torch.equal(restored.view(torch.int64), torch.cat([*whole, torch.empty(0, dtype=torch.int64)]))


def _in_order(filled: torch.Tensor, records: ShardRecords) -> torch.Tensor:
    with TemporaryFile() as file:
        file.write(filled.numpy().tobytes())
        file.flush()
        for column in records.columns:
            if isinstance(order := column.copied_by, RankOrder):
                room = memoryview(bytearray(order.largest_block))
                order.put_in_order(file.fileno(), column.offsets[0], room)
        file.seek(0)
        return torch.frombuffer(bytearray(file.read() or b" "), dtype=torch.uint8)[: len(filled)]


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
        ({"tokens": [torch.zeros(1)]}, "'tokens' has 1 entry for 7 samples"),
        ({"loss_masks": []}, "'loss_masks' has 0 entries for 7 samples"),
        ({"log_probs": [torch.zeros(1)]}, "'log_probs' needs one tensor per sample: it has 1, for 7 samples"),
        ({"log_probs": torch.zeros(7)}, r"'log_probs' of sample 0 has shape \(\)"),
        ({"log_probs": "text"}, "'log_probs' needs one tensor per sample: it has a str"),
        ({"n" * 1025: 1}, "longer than 1024 bytes"),
        ({"deep": [torch.zeros([1] * 65)] * 7}, "'deep' has 65 dimensions"),
        ({"partition": [0]}, "'partition' has 1 entry for 7 samples"),
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


@given(
    responses=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    prompt=st.integers(0, 3),
    cut=st.sampled_from(ContextLayout),
    size=st.sampled_from([2, 3, 4]),
    kinds=st.lists(st.sampled_from(["flat", "wide", "mixed", "bool"]), min_size=1, max_size=3),
    block_bytes=st.integers(1, 400),
    bytes_a_call=st.sampled_from([2**31 - 4096, 100, 7]),
)
def test_columns_of_any_rows_are_put_in_order_block_by_block_however_little_the_kernel_moves_at_once(
    responses: list[int],
    prompt: int,
    cut: ContextLayout,
    size: int,
    kinds: list[str],
    block_bytes: int,
    bytes_a_call: int,
) -> None:
    names = ["values", "returns", "advantages"][: len(kinds)]
    wholes = {
        name: [_rows(kind, slot, rows) for slot, rows in enumerate(responses)]
        for name, kind in zip(names, kinds, strict=False)
    }
    totals = [prompt + rows for rows in responses]
    pieces = [pieces_of(cut, size, total, rows, 64) for total, rows in zip(totals, responses, strict=True)]
    lengths = {"response_lengths": responses, "total_lengths": totals, "max_seq_lens": [64] * len(responses)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollcast.producer.rank_order._BLOCK_BYTES", block_bytes)
        plans = []
        for rank in range(size):
            share = {
                name: [
                    torch.cat([tensor[low:high] for low, high in spans_of(rank, held)] or [tensor[:0]])
                    for tensor, held in zip(tensors, pieces, strict=True)
                ]
                for name, tensors in wholes.items()
            }
            plans.append(make_plan({**lengths, **share}, _layout(rank, size), context_layout=cut))
        filled = torch.full((plans[0].data_bytes,), 255, dtype=torch.uint8)
        assert sum(copy_own(plan, rank, filled) for rank, plan in enumerate(plans)) <= len(filled)
        patch.setattr("os.preadv", lambda file, rooms, at: _preadv(file, [rooms[0][:bytes_a_call]], at))
        patch.setattr("os.pwritev", lambda file, pieces, at: _pwritev(file, _first_bytes(pieces, bytes_a_call), at))
        restored = _in_order(filled, plans[0].records)
    expected = []
    for tensors in wholes.values():
        for tensor, total, rows in zip(tensors, totals, responses, strict=True):
            if total == rows and rows:
                tensor[0] = 0
            expected.append(tensor_bytes(tensor))
    assert torch.equal(restored, torch.cat(expected))


_preadv, _pwritev = os.preadv, os.pwritev


def _first_bytes(pieces: list[memoryview], count: int) -> list[memoryview]:
    first = []
    for piece in pieces:
        first.append(piece[:count])
        count -= len(first[-1])
    return first


def _rows(kind: str, slot: int, rows: int) -> torch.Tensor:
    numbers = torch.arange(1, rows + 1) + slot
    if kind == "flat":
        return numbers.float()
    if kind == "bool":
        return numbers % 2 == 0
    if kind == "wide":
        return numbers[:, None].repeat(1, 3).short()
    return numbers.half() if slot % 2 else numbers[:, None].repeat(1, 2).double()
