"""Reports in one process: denominators, masks, what is refused."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollcast.producer.errors import RolloutDataError
from rollcast.producer.reports import (
    gather_and_reduce_log_dict,
    get_sum_of_sample_mean,
    reduce_train_step_metrics,
    rollout_log_metric_contribution,
)

NAN = float("nan")


def _reduce(x: list[float], masks: list[list[Any]], **options: Any) -> float:
    lengths = [len(mask) for mask in masks]
    reducer = get_sum_of_sample_mean(
        [length + 4 for length in lengths], lengths, [torch.tensor(mask) for mask in masks], **options
    )
    return reducer(torch.tensor(x)).item()


@pytest.mark.parametrize(
    ("x", "masks", "options", "expected"),
    [
        ([1, 1, 1, 5], [[1, 1, 1], [1]], {}, 6.0),
        ([1, 1, 1, 5], [[1, 1, 1], [1]], {"calculate_per_token_loss": True}, 8.0),
        ([1, 2, 3, 4], [[1, 1], [1, 1]], {"sample_denoms": [4, 4]}, 2.5),
        ([1, 2, 3, 4], [[1, 1], [1, 1]], {"sample_denoms": torch.tensor([4.0, 4.0])}, 2.5),
        ([1, 2, 3, 4], [[0, 0], [0, 0]], {"sample_denoms": [0, 0]}, 0.0),
        ([1, 2, 2, 4], [[0, 0], [1, 1]], {}, 3.0),
        ([0.5, NAN], [[True, False]], {}, 0.5),
        ([0.5, math.inf], [[1, 0]], {"calculate_per_token_loss": True}, 0.5),
        ([1, 2, 3, 4], [[0.5, 1.5], [0.25, 0.25]], {}, 3.5 / 2 + 1.75),
    ],
)
def test_a_sample_counts_by_its_masked_sum_and_denominator(
    x: list[float], masks: list[list[Any]], options: dict[str, Any], expected: float
) -> None:
    assert _reduce([float(value) for value in x], masks, **options) == expected


def test_a_nan_under_the_mask_stays_one() -> None:
    assert math.isnan(_reduce([0.5, NAN], [[1, 1]]))


def test_no_sample_gives_zero_that_can_be_differentiated() -> None:
    x = torch.empty(0, requires_grad=True)
    result = get_sum_of_sample_mean([], [], [])(x)
    assert result.item() == 0.0
    assert torch.autograd.grad(result, x)[0].shape == (0,)


def test_the_gradient_of_a_masked_nan_is_zero() -> None:
    x = torch.tensor([2.0, NAN, 4.0], requires_grad=True)
    result = get_sum_of_sample_mean([7], [3], [torch.tensor([1, 0, 1])])(x)
    assert torch.autograd.grad(result, x)[0].tolist() == [0.5, 0.0, 0.5]


@given(st.lists(st.lists(st.tuples(st.integers(-8, 8), st.booleans()), max_size=5), max_size=6), st.data())
def test_sums_of_micro_batches_add_up_wherever_they_are_cut(
    samples: list[list[tuple[int, bool]]], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(samples)))

    def total(part: list[list[tuple[int, bool]]]) -> float:
        x = [float(value) for sample in part for value, _ in sample]
        lengths = [len(sample) for sample in part]
        masks = [torch.tensor([kept for _, kept in sample], dtype=torch.bool) for sample in part]
        return get_sum_of_sample_mean(lengths, lengths, masks)(torch.tensor(x, dtype=torch.float64)).item()

    assert math.isclose(total(samples), total(samples[:cut]) + total(samples[cut:]), abs_tol=1e-9)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"total_lengths": [4]}, "'total_lengths' has 1 entry for 2"),
        ({"sample_denoms": [1, 2, 3]}, "'sample_denoms' has 3"),
        ({"max_seq_lens": [8]}, "'max_seq_lens' has 1"),
        ({"loss_masks": [torch.ones(2), torch.ones(2)]}, "loss mask of sample 1"),
    ],
)
def test_misaligned_columns_are_refused_by_name(changed: dict[str, Any], words: str) -> None:
    columns: dict[str, Any] = {
        "total_lengths": [4, 5],
        "response_lengths": [2, 3],
        "loss_masks": [torch.ones(2), torch.ones(3)],
    }
    with pytest.raises(RolloutDataError, match=words):
        get_sum_of_sample_mean(**columns | changed)


@pytest.mark.parametrize("shape", [(4,), (6,), (5, 1)])
def test_a_tensor_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    reducer = get_sum_of_sample_mean([4, 5], [2, 3], [torch.ones(2), torch.ones(3)])
    with pytest.raises(RolloutDataError, match="holds 5 response tokens"):
        reducer(torch.zeros(shape))


def _train(losses_reduced: list[dict[str, Any]], **changed: Any) -> dict[str, float]:
    options = {"calculate_per_token_loss": False, "step_global_batch_size": 4, "cp_size": 2, "dp_with_cp_group": None}
    return reduce_train_step_metrics(losses_reduced, **options | changed)


def test_training_metrics_are_per_rollout_or_per_token_with_the_context_parallel_factor() -> None:
    values = torch.tensor([8.0, 2.0, NAN])
    items: list[dict[str, Any]] = [{"keys": ["loss", "kl"], "values": values}] * 2
    per_rollout = _train(items)
    assert per_rollout["loss"] == 1.0
    assert math.isnan(per_rollout["kl"])
    assert _train(items, calculate_per_token_loss=True)["loss"] == 0.5
    assert values[:2].tolist() == [8.0, 2.0]


@pytest.mark.parametrize(
    ("items", "changed", "words"),
    [
        ([], {}, "losses_reduced is empty"),
        ([{"keys": ["a"], "values": torch.ones(3)}], {}, r"1 metric key and values of \(3,\)"),
        ([{"keys": ["a"], "values": [1.0, 2.0]}], {}, "values of list"),
        ([{"values": torch.ones(2)}], {}, "0 metric keys"),
        ([{"keys": [key], "values": torch.ones(2)} for key in "ab"], {}, "micro-batch 1 has the metric keys"),
        ([{"keys": ["a"], "values": torch.ones(2)}], {"step_global_batch_size": 0}, "step_global_batch_size is 0"),
    ],
)
def test_unusable_losses_are_refused(items: list[dict[str, Any]], changed: dict[str, Any], words: str) -> None:
    with pytest.raises(RolloutDataError, match=words):
        _train(items, **changed)


def _gather(log_dict: dict[Any, Any]) -> dict[str, float] | None:
    return gather_and_reduce_log_dict(log_dict, dp_size=1, dp_src_rank=0, dp_group=None)


def test_a_log_dict_of_one_rank_is_reduced_without_a_group() -> None:
    log_dict = {"a": (6.0, 4), "b": torch.tensor(2.0), "c": True, "empty": (0.0, 0), "lost": (NAN, 0.0)}
    assert _gather(log_dict) == {"a": 1.5, "b": 2.0, "c": 1.0}


def test_the_contributions_of_all_ranks_give_the_mean_over_rollouts() -> None:
    pairs = [
        rollout_log_metric_contribution(torch.tensor(part), cp_size=2, num_rollouts_in_rollout=6, dp_size=2)
        for part in (1.0, 2.0, 3.0, 6.0)
    ]
    assert sum(total for total, _ in pairs) / sum(count for _, count in pairs) == 2.0


@pytest.mark.parametrize(
    "value",
    ["high", None, [1.0, 2.0], (1.0, 2.0, 3.0), (1.0, None), (1.0, -1), (1.0, NAN), torch.ones(2), 1j, 10**400],
)
def test_what_is_not_a_number_is_refused_with_its_key(value: object) -> None:
    with pytest.raises(RolloutDataError, match="rank 0 cannot be used: metric 'reward' is "):
        _gather({"fine": 1.0, "reward": value})


def test_a_key_that_is_not_a_name_is_refused() -> None:
    with pytest.raises(RolloutDataError, match="metric 3 is"):
        _gather({3: 1.0})
