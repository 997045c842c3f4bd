"""Assembled rollouts to payloads: verified, or refused by slot; and what is left of incomplete ones."""

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fixtures.frames import ShardSource, direct_shards, events_of
from rollcast.consumer import differences
from rollcast.consumer.assembler import Assembler
from rollcast.consumer.decisions import Complete
from rollcast.consumer.restore import restore
from rollcast.consumer.rollout import Place, Rollout
from rollcast.schemas import Column, DpShard, SamplePart, TensorRef, TensorSlice, build_dump_payload
from rollcast.schemas.tensors import UNSUPPORTED_KEY

Event = SamplePart | DpShard


def shards() -> list[ShardSource]:
    return [
        ShardSource(
            rank=3 + 4 * rank,
            data_parallel_rank=rank,
            rollout_data={
                "response_lengths": [3, 4, 5],
                "tokens": [torch.arange(3) + rank, torch.arange(4) + rank, torch.arange(5) + rank],
                "partition": [rank, 2 + rank, 4 + rank],
                "sample_indices": [10 + rank, 12 + rank, 14 + rank],
                "raw_reward": [1.0] * 6,
                "two_of_a_shard": ["x", "y"],
                "four_of_a_shard": [1, 2, 3, 4],
                "num_microbatches": [1, 1],
            },
        )
        for rank in range(2)
    ]


def assembled(change: Callable[[Event], Event | None] = lambda event: event) -> Rollout:
    assembler = Assembler(incomplete_after_s=1, max_resident_bytes=10**9)
    for offset, event in enumerate(events_of("run", 1, 5, shards())):
        changed = change(event)
        if changed is None:
            continue
        for decision in assembler.add(changed, Place(0, offset), size=1, now=0):
            assert isinstance(decision, Complete)
            return decision.rollout
    (incomplete,) = assembler.expire(1)
    return incomplete.rollout


def direct() -> dict[str, Any]:
    return build_dump_payload(direct_shards(shards()), rollout_id=5, writer_rank=3)


def test_a_complete_rollout_restores_to_the_payload_of_its_direct_shards() -> None:
    restored = restore(assembled())

    assert differences(restored.payload, direct()) == []
    assert not restored.missing
    assert restored.bad_slots == ()


def _is(event: Event, rank: int, slot: int) -> bool:
    return isinstance(event, SamplePart) and (event.data_parallel_rank, event.slot) == (rank, slot)


def test_a_slot_with_another_digest_is_refused_and_named() -> None:
    restored = restore(assembled(lambda event: _with_other_tokens(event) if _is(event, 1, 2) else event))

    assert restored.payload is None
    (bad,) = restored.bad_slots
    assert (bad.slot.cut.data_parallel_rank, bad.slot.cut.slot) == (1, 2)
    assert "digest" in bad.problem


def _with_other_tokens(event: Event) -> Event:
    assert isinstance(event, SamplePart)
    other = next(part for part in events_of("run", 1, 5, shards()) if isinstance(part, SamplePart) and _is(part, 0, 2))
    return replace(event, columns=other.columns)


def _with_bad_tensor(event: Event, **change: Any) -> Event:
    assert isinstance(event, SamplePart)
    columns = tuple(
        replace(column, value=replace(column.value, **change)) if isinstance(column.value, TensorSlice) else column
        for column in event.columns
    )
    return replace(event, columns=columns)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (-1, -4)},
        {"shape": (10**12,)},
        {"total_bytes": 2**50},
        {"dtype": "object"},
        {"codec": "PLANES"},
        {"codec": "DELTA_PLANES"},
        {"codec": "DELTA_PLANES", "base": 2**31 - 1},
        {"codec": "DELTA_PLANES", "base": -1},
        {"codec": "SPOOL"},
        {"offset": 8},
        {"slice_bytes": -1},
        {"data": b""},
    ],
)
def test_hostile_content_costs_its_slot_and_no_more(change: dict[str, Any]) -> None:
    restored = restore(assembled(lambda event: _with_bad_tensor(event, **change) if _is(event, 0, 0) else event))

    assert [bad.slot.cut.slot for bad in restored.bad_slots] == [0]
    assert restored.problem is None


def test_content_that_no_payload_can_be_made_of_is_a_problem_and_no_crash() -> None:
    def without_tokens(event: Event) -> Event:
        if isinstance(event, SamplePart) and _is(event, 0, 1):
            return replace(event, columns=tuple(column for column in event.columns if column.name != "tokens"))
        return event

    rollout = assembled(without_tokens)
    believed = [replace(shard, event=None) for shard in rollout.shards]

    restored = restore(replace(rollout, shards=tuple(believed)))

    assert restored.payload is None
    assert "tokens" in (restored.problem or "")


def test_an_incomplete_rollout_restores_to_the_samples_that_are_there() -> None:
    restored = restore(assembled(lambda event: None if _is(event, 1, 1) else event))

    assert restored.missing.slots == ((1, (1,)),)
    assert restored.payload is not None
    expected = direct()
    del expected["samples"][3]
    layout = expected["dp_shards"][1]
    layout["partition"], layout["sample_indices"] = [1, 5], [11, 15]
    # With two samples left, this would pass for one of their columns.
    del layout["two_of_a_shard"]
    assert differences(restored.payload, expected) == []


def test_a_bad_slot_of_an_incomplete_rollout_is_missing_too() -> None:
    def change(event: Event) -> Event | None:
        if _is(event, 1, 1):
            return None
        return _with_bad_tensor(event, data=b"") if _is(event, 0, 0) else event

    restored = restore(assembled(change))

    assert restored.missing.slots == ((0, (0,)), (1, (1,)))
    assert restored.payload is not None
    assert [sample["rollout_position"] for sample in restored.payload["samples"]] == [1, 2, 4, 5]


def test_a_missing_shard_costs_its_samples_only() -> None:
    restored = restore(assembled(lambda event: None if event.data_parallel_rank == 0 else event))

    assert restored.missing.shards == (0,)
    assert restored.payload is not None
    assert [sample["rollout_position"] for sample in restored.payload["samples"]] == [1, 3, 5]
    assert restored.payload["rank"] == 7


def test_without_a_closing_event_the_samples_are_there_and_the_rank_is_unknown() -> None:
    restored = restore(assembled(lambda event: None if isinstance(event, DpShard) else event))

    assert restored.payload is not None
    assert len(restored.payload["samples"]) == 6
    assert restored.payload["rank"] == -1


def test_without_the_shards_own_columns_positions_are_still_known() -> None:
    restored = restore(assembled(lambda event: None if _is(event, 0, -1) else event))

    assert restored.payload is not None
    assert [sample["rollout_position"] for sample in restored.payload["samples"]] == [0, 1, 2, 3, 4, 5]
    assert restored.payload["dp_shards"][0]["partition"] == [0, 2, 4]


A_SLICE = TensorSlice(dtype="int8", shape=(1,), total_bytes=1, offset=0, slice_bytes=1, codec="RAW", data=b"x")


def policy_loss_call(value: Any) -> Rollout:
    """What came of a call without its closing events: no digest stands against the value."""

    def change(event: Event) -> Event | None:
        if isinstance(event, DpShard):
            return None
        return replace(event, stream="policy-loss/3", columns=(*event.columns, Column("odd", 0, value)))

    return assembled(change)


def test_a_policy_loss_call_is_normalised_as_a_train_payload_is() -> None:
    restored = restore(policy_loss_call({(1, 2): "a tuple is no key"}))

    assert restored.payload is not None
    assert all(sample["odd"] == {UNSUPPORTED_KEY: "builtins.dict"} for sample in restored.payload["samples"])
    assert restored.payload["odd"] == {UNSUPPORTED_KEY: "builtins.dict"}


@pytest.mark.parametrize(
    "value", [[A_SLICE], ({"a": A_SLICE},), {UNSUPPORTED_KEY: A_SLICE}, {TensorRef(1): 1}, {A_SLICE: 1}]
)
def test_a_policy_loss_call_with_hostile_columns_loads_without_running_code(value: Any) -> None:
    restored = restore(policy_loss_call(value))

    assert restored.problem is None
    file = io.BytesIO()
    torch.save(restored.payload, file)
    file.seek(0)
    torch.load(file, weights_only=True)
