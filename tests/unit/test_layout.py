"""Layouts of dumps: one v2 file, or each shard's own `rollout_data` again."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fixtures.frames import ShardSource, direct_shards, events_of
from rollcast.consumer import differences
from rollcast.consumer.assembler import Assembler
from rollcast.consumer.config import Layout
from rollcast.consumer.decisions import Complete
from rollcast.consumer.errors import LayoutError
from rollcast.consumer.layout import files_of
from rollcast.consumer.restore import restore
from rollcast.consumer.rollout import Place, Rollout
from rollcast.schemas import DpShard, SamplePart, build_dump_payload


def source(rank: int, count: int, **fields: Any) -> ShardSource:
    lengths = [rank + index for index in range(count)]
    data = {
        "response_lengths": lengths,
        "tokens": [torch.full((length,), 10 * rank + index) for index, length in enumerate(lengths)],
        "raw_reward": [1.0, 2.0],
        "num_microbatches": [1],
        "extra": {"of": rank},
        **fields,
    }
    return ShardSource(rank=4 * rank + 3, data_parallel_rank=rank, rollout_data=data)


def assembled(sources: list[ShardSource], *, without: tuple[int, int] | None = None, closing: bool = True) -> Rollout:
    assembler = Assembler(incomplete_after_s=1, max_resident_bytes=10**9)
    for offset, event in enumerate(events_of("run", 1, 5, sources)):
        if isinstance(event, SamplePart) and (event.data_parallel_rank, event.slot) == without:
            continue
        if isinstance(event, DpShard) and event.data_parallel_rank == 1 and not closing:
            continue
        for decision in assembler.add(event, Place(0, offset), size=1, now=0):
            assert isinstance(decision, Complete)
            return decision.rollout
    (incomplete,) = assembler.expire(1)
    return incomplete.rollout


def miles(rollout: Rollout) -> dict[int, dict[str, Any]]:
    restored = restore(rollout)
    assert restored.payload is not None
    return {file.rank: dict(file.content) for file in files_of(Layout.MILES, restored.payload, rollout)}


def equal(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether all keys and values are equal; the order of keys is free."""
    return found.keys() == expected.keys() and not [
        name for name in found if differences(found[name], expected[name]) != []
    ]


PLACES = st.lists(st.integers(0, 6), min_size=0, max_size=6)


@given(PLACES, PLACES, st.sampled_from(["partition", "sample_indices", "both", "neither"]))
def test_each_shard_gets_its_own_rollout_data_in_slot_order(first: list[int], second: list[int], known: str) -> None:
    names = {"both": ["partition", "sample_indices"], "neither": []}.get(known, [known])
    sources = [source(rank, len(places), **dict.fromkeys(names, places)) for rank, places in enumerate((first, second))]
    payload = build_dump_payload(direct_shards(sources), rollout_id=5, writer_rank=3)

    files = files_of(Layout.MILES, payload, assembled(sources))

    assert [file.rank for file in files] == [3, 7]
    for file, shard in zip(files, sources, strict=True):
        data = dict(shard.rollout_data)
        if not data["response_lengths"]:
            del data["tokens"]  # a column without entries has no sample to stand in
        assert equal(file.content["rollout_data"], data)


def test_a_file_of_miles_has_exactly_the_keys_that_miles_reads() -> None:
    content = miles(assembled([source(0, 2, partition=[1, 0])]))[3]

    assert {name: value for name, value in content.items() if name != "rollout_data"} == {
        "rollout_id": 5,
        "rank": 3,
        "cp_rank": 0,
        "cp_size": 1,
        "qkv_format": "thd",
    }


def test_the_format_of_padded_sequences_is_told() -> None:
    rollout = assembled([source(0, 2)])
    (shard,) = rollout.shards
    assert shard.event is not None
    padded = replace(shard, event=replace(shard.event, context_parallel_layout="zigzag-bshd"))

    assert miles(replace(rollout, shards=(padded,)))[3]["qkv_format"] == "bshd"


def test_an_incomplete_rollout_has_the_samples_that_are_there() -> None:
    sources = [source(0, 3, partition=[4, 2, 0]), source(1, 3, partition=[5, 3, 1])]

    data = miles(assembled(sources, without=(1, 1)))[7]["rollout_data"]

    assert data["partition"] == [5, 1]
    assert data["response_lengths"] == [1, 3]


def test_a_shard_without_its_closing_event_has_a_file_of_its_own() -> None:
    sources = [source(0, 2, partition=[2, 0]), source(1, 2, partition=[3, 1])]

    files = miles(assembled(sources, closing=False))

    assert set(files) == {3, -2}
    assert files[-2]["rank"] == -1
    assert files[-2]["rollout_data"]["partition"] == [3, 1]


def test_shards_that_claim_one_rank_are_refused() -> None:
    twice = [source(0, 1), replace(source(1, 1), rank=3)]
    with pytest.raises(LayoutError, match="share a rank"):
        miles(assembled(twice))


@pytest.mark.parametrize(
    "column",
    [
        {"data_parallel_rank": [7, 7]},
        {"data_parallel_rank": [torch.zeros(2), torch.zeros(2)]},
        {"rollout_position": [1, 2], "partition": [3, 4]},
        {"rollout_position": [torch.tensor(3), torch.tensor(4)], "partition": [3, 4]},
    ],
)
def test_a_column_that_hides_whose_sample_it_is_is_refused(column: dict[str, Any]) -> None:
    with pytest.raises(LayoutError, match="rename it"):
        miles(assembled([source(0, 2, **column)]))


def test_the_layout_of_slime_is_the_payload_as_it_is() -> None:
    rollout = assembled([source(0, 2)])
    restored = restore(rollout)
    assert restored.payload is not None

    (file,) = files_of(Layout.SLIME, restored.payload, rollout)

    assert file.content is restored.payload
    assert file.rank == 3
