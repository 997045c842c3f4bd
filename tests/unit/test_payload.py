"""The v2 dump contract."""

import io
import logging
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollcast.schemas import RolloutDataError, build_dump_payload


def _payload(*rollout_data: dict[str, Any], rollout_id: int = 1) -> dict[str, Any]:
    shards = [
        {"rank": 4 * rank, "data_parallel_rank": rank, "rollout_data": data} for rank, data in enumerate(rollout_data)
    ]
    return build_dump_payload(shards, rollout_id=rollout_id, writer_rank=0)


def _shard(count: int, **fields: Any) -> dict[str, Any]:
    return {"response_lengths": [1] * count, **fields}


def test_the_payload_has_exactly_the_keys_of_version_2() -> None:
    payload = _payload(_shard(1, tokens=[torch.arange(3)], raw_reward=[1.0, 0.0], extra="kept", partition=[0]))
    assert list(payload) == ["format_version", "rollout_id", "rank", "samples", "dp_shards", "raw_reward"]
    assert (payload["format_version"], payload["rollout_id"], payload["rank"]) == (2, 1, 0)
    assert list(payload["samples"][0]) == [
        "data_parallel_rank",
        "sample_index",
        "rollout_position",
        "response_lengths",
        "tokens",
    ]
    assert payload["dp_shards"] == [
        {
            "rank": 0,
            "data_parallel_rank": 0,
            "sample_indices": None,
            "partition": [0],
            "micro_batch_indices": None,
            "num_microbatches": None,
            "global_batch_sizes": None,
            "extra": "kept",
        }
    ]


def test_samples_are_ordered_by_position_when_all_have_one() -> None:
    none = [None, None]
    payload = _payload(
        _shard(2, partition=[2, 0], sample_indices=none), _shard(2, partition=[3, 1], sample_indices=none)
    )
    assert [sample["rollout_position"] for sample in payload["samples"]] == [0, 1, 2, 3]


def test_samples_are_ordered_by_index_when_a_position_is_missing() -> None:
    payload = _payload(_shard(2, partition=[0, None], sample_indices=[5, 3]))
    assert [sample["sample_index"] for sample in payload["samples"]] == [3, 5]


def test_samples_without_order_stay_and_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    payload = _payload(_shard(2, reward=[1, 2]), _shard(1, reward=[3]))
    assert [sample["reward"] for sample in payload["samples"]] == [1, 2, 3]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@given(
    st.lists(st.lists(st.tuples(st.none() | st.integers(0, 3), st.none() | st.integers(0, 3)), max_size=4), max_size=4)
)
def test_the_order_is_a_stable_sort_by_what_every_sample_has(shards: list[list[tuple[int | None, int | None]]]) -> None:
    numbered = iter(range(100))
    payload = _payload(
        *(
            _shard(
                len(shard),
                partition=[position for position, _ in shard],
                sample_indices=[index for _, index in shard],
                number=[next(numbered) for _ in shard],
            )
            for shard in shards
        )
    )
    samples = [(*places, number) for number, places in enumerate(places for shard in shards for places in shard)]
    for key in (0, 1):
        if all(sample[key] is not None for sample in samples):
            samples.sort(key=lambda sample: sample[key] or 0)
            break
    assert [sample["number"] for sample in payload["samples"]] == [number for _, _, number in samples]


def test_equal_positions_are_data_and_keep_shard_order() -> None:
    payload = _payload(_shard(2, partition=[0, 0], value=[0.0, 9.0]), _shard(1, partition=[0], value=[1.0]))
    assert [sample["value"] for sample in payload["samples"]] == [0.0, 9.0, 1.0]


def test_the_first_raw_reward_wins_and_a_disagreement_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    payload = _payload(
        _shard(1, raw_reward=[1, 0], partition=[0]), _shard(1, raw_reward=[5, 6], partition=[1]), rollout_id=9
    )
    assert payload["raw_reward"] == [1, 0]
    assert "rollout 9" in caplog.text
    assert "raw_reward" not in payload["samples"][0]


def test_a_whole_batch_field_as_long_as_the_shard_is_no_column() -> None:
    payload = _payload(_shard(2, raw_reward=[1, 0], num_microbatches=[1, 1], partition=[0, 1]))
    assert payload["dp_shards"][0]["num_microbatches"] == [1, 1]
    assert set(payload["samples"][0]) == {"data_parallel_rank", "sample_index", "rollout_position", "response_lengths"}


def test_lengths_of_correct_samples_follow_the_positions() -> None:
    raw_reward = [1, 0, 1, 0]
    payload = _payload(
        {"response_lengths": [30, 10], "partition": [2, 0], "raw_reward": raw_reward},
        {"response_lengths": [40, 20], "partition": [3, 1], "raw_reward": raw_reward},
    )
    correct = [s["response_lengths"] for s, r in zip(payload["samples"], raw_reward, strict=True) if r]
    assert np.mean(correct) == 20


def test_a_saved_dump_is_as_small_as_its_samples_and_loads_without_pickle() -> None:
    source = torch.zeros(1_000_000)
    payload = _payload(
        _shard(1, part=[source[:1000]], reward=[np.float64(1.0)], alias=[source[:1000]], odd=[object()], partition=[0])
    )
    out = io.BytesIO()
    torch.save(payload, out)
    assert len(out.getvalue()) < 60_000
    out.seek(0)
    (sample,) = torch.load(out, weights_only=True)["samples"]
    assert type(sample["reward"]) is float
    assert sample["part"].untyped_storage().nbytes() == 4000
    assert sample["part"].data_ptr() != sample["alias"].data_ptr()


def test_rows_of_a_tensor_column_belong_to_the_samples() -> None:
    rows = torch.arange(6.0, requires_grad=True).reshape(2, 3)
    payload = _payload(_shard(2, rows=rows, partition=torch.tensor([1, 0])))
    assert payload["samples"][0]["rows"].tolist() == [3.0, 4.0, 5.0]
    assert not payload["samples"][0]["rows"].requires_grad
    assert payload["dp_shards"][0]["partition"] == [1, 0]


def test_no_shard_and_no_sample_give_an_empty_payload() -> None:
    assert _payload()["samples"] == []
    assert _payload(_shard(0, tokens=[]))["samples"] == []


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"tokens": []}, "response_lengths"),
        (_shard(2, partition=[0]), "'partition' has 1 entry for 2 samples"),
        (_shard(1, sample_indices=["a"]), "integers or None"),
        (_shard(1, sample_indices="0"), "one integer per sample"),
        (dict([*_shard(1).items(), (3, [1])]), "key 3"),
    ],
)
def test_a_misaligned_shard_is_refused_in_one_sentence(data: dict[str, Any], words: str) -> None:
    with pytest.raises(RolloutDataError, match=words):
        _payload(data)
