"""Metrics of one rollout: both denominators, and what cannot be measured."""

import itertools
import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollcast.consumer.metrics import Measuring, Metric

NAN, INF = math.nan, math.inf


def sample(
    values: list[float] | None = None, mask: list[int] | None = None, *, rollout: int | None = None, **more: object
) -> dict[str, Any]:
    built: dict[str, Any] = dict(more)
    if values is not None:
        built["entropy"] = torch.tensor(values)
        built["loss_masks"] = torch.tensor(mask if mask is not None else [1] * len(values), dtype=torch.int32)
    if rollout is not None:
        built["rollout_ids"] = rollout
    return built


def metric(name: str, *samples: dict[str, Any]) -> Metric:
    return {metric.name: metric for metric in Measuring(samples).result()}[name]


def means(measured: Metric) -> tuple[float | None, float | None]:
    return measured.per_rollout_mean, measured.per_token_mean


def test_each_sample_alone_is_a_rollout() -> None:
    assert means(metric("entropy", sample([1, 1, 1]), sample([5]))) == (3.0, 2.0)


def test_samples_of_one_rollout_share_one_denominator_in_any_order() -> None:
    tokens: list[list[float]] = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]
    samples = [
        sample(values, rollout=rollout, data_parallel_rank=rank)
        for rank, (values, rollout) in enumerate(zip(tokens, [0, 0, 0, 1], strict=True))
    ]
    for order in itertools.permutations(samples):
        assert means(metric("entropy", *order)) == (8.0, 6.5)


def test_each_rollout_weighs_the_same_for_a_quantity_of_samples() -> None:
    rows = [sample(rewards=1.0, rollout=0)] + [sample(rewards=0.0, rollout=1)] * 4

    measured = metric("reward", *rows)

    assert means(measured) == (0.5, 0.2)
    assert (measured.rollout_count, measured.token_count) == (2, 5)


def test_a_fully_masked_rollout_counts_as_zero() -> None:
    measured = metric("entropy", sample([9, 9], [0, 0], rollout=0), sample([2, 4], rollout=1))

    assert means(measured) == (1.5, 3.0)


def test_when_all_is_masked_there_is_no_mean() -> None:
    assert means(metric("entropy", sample([9, 9], [0, 0]))) == (None, None)


def test_no_samples_have_no_metrics() -> None:
    assert all(means(measured) == (None, None) for measured in Measuring([]).result())


def test_a_value_outside_the_mask_may_be_anything() -> None:
    measured = metric("entropy", sample([0.5, NAN], [1, 0]))

    assert (means(measured), measured.non_finite_count) == ((0.5, 0.5), 0)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_value_that_is_not_finite_is_counted_and_not_averaged_in(bad: float) -> None:
    measured = metric("entropy", sample([0.5, bad], [1, 1], rewards=2.0))

    assert (means(measured), measured.non_finite_count) == ((0.5, 0.5), 1)
    assert means(metric("reward", sample([0.5, bad], rewards=2.0))) == (2.0, 2.0)


def test_a_rollout_of_which_nothing_is_finite_invents_no_zero() -> None:
    measured = metric("entropy", sample([NAN]), sample([4]))

    assert (means(measured), measured.rollout_count, measured.non_finite_count) == ((4.0, 4.0), 1, 1)


def test_an_absent_value_is_counted_and_invents_no_zero() -> None:
    rows = [
        sample(log_probs=torch.tensor([-0.1]), rollout_log_probs=torch.tensor([-0.1])),
        sample(log_probs=torch.tensor([-0.2]), rollout_log_probs=None),
        sample(log_probs=torch.tensor([-0.3]), rollout_log_probs=torch.tensor([-1.3])),
    ]

    measured = metric("train_rollout_logprob_abs_diff", *rows)

    assert means(measured) == pytest.approx((0.5, 0.5))
    assert (measured.rollout_count, measured.missing_count) == (2, 1)


def test_values_of_another_length_than_the_mask_are_counted_as_missing() -> None:
    measured = metric("entropy", {"entropy": torch.tensor([1.0, 2.0]), "loss_masks": torch.tensor([1])}, sample([3]))

    assert (means(measured), measured.missing_count) == ((3.0, 3.0), 1)


@pytest.mark.parametrize("reward", [None, {"correct": 1.0}, "good", [1.0, 2.0], torch.ones(2)])
def test_a_reward_that_is_no_number_is_counted_apart(reward: object) -> None:
    measured = metric("reward", sample(rewards=reward), sample(rewards=3))

    assert (means(measured), measured.missing_count) == ((3.0, 3.0), 1)


@pytest.mark.parametrize("reward", [1, 1.0, True, torch.tensor(1.0), torch.tensor([1], dtype=torch.int64)])
def test_a_reward_may_be_any_kind_of_number(reward: object) -> None:
    assert means(metric("reward", sample(rewards=reward))) == (1.0, 1.0)


def test_k3_is_exact_and_not_clamped() -> None:
    pairs = sample(log_probs=torch.tensor([0.0, 0.0]), rollout_log_probs=torch.tensor([-30.0, 1.0]))

    measured = metric("k3_kl", pairs)

    expected = [math.exp(30) - 1 - 30, math.exp(-1) - 1 + 1]
    assert measured.per_token_mean == pytest.approx(sum(expected) / 2, rel=1e-14)


def test_k3_of_a_tiny_difference_does_not_cancel() -> None:
    d = 1e-6
    pair = sample(
        log_probs=torch.tensor([d], dtype=torch.float64), rollout_log_probs=torch.tensor([0.0], dtype=torch.float64)
    )

    assert metric("k3_kl", pair).per_token_mean == pytest.approx(d * d / 2, rel=1e-4)


def test_k3_beyond_a_double_is_counted_as_not_finite() -> None:
    pair = sample(log_probs=torch.tensor([5000.0, 0.0]), rollout_log_probs=torch.tensor([0.0, 0.0]))

    measured = metric("k3_kl", pair)

    assert (means(measured), measured.non_finite_count) == ((0.0, 0.0), 1)


def test_a_sum_beyond_a_double_has_no_mean_and_raises_no_warning() -> None:
    huge = torch.full((4,), 1.5e308, dtype=torch.float64)

    assert means(metric("entropy", {"entropy": huge}, {"entropy": -huge})) == (None, None)


def test_bfloat16_and_lists_are_measured_in_double() -> None:
    rows = [
        sample(log_probs=torch.tensor([-0.1]), rollout_log_probs=torch.tensor([-0.1], dtype=torch.bfloat16)),
        sample(log_probs=[-0.5], rollout_log_probs=[0.0]),
    ]
    exact = abs(float(torch.tensor(-0.1)) - float(torch.tensor(-0.1).bfloat16()))

    assert metric("train_rollout_logprob_abs_diff", *rows).per_token_mean == pytest.approx((exact + 0.5) / 2, rel=1e-15)


def test_the_names_are_those_of_the_contract_and_the_numbers_strict_json() -> None:
    measured = Measuring([sample([NAN, 1], response_lengths=2, advantages=torch.tensor([1.0, INF]))]).result()

    assert [metric.name for metric in measured] == [
        "train_rollout_logprob_abs_diff",
        "k3_kl",
        "entropy",
        "advantage",
        "reward",
        "response_length",
    ]
    json.dumps([metric.as_json() for metric in measured], allow_nan=False)


def test_a_value_that_cannot_be_measured_costs_its_metric_with_a_reason_and_no_other() -> None:
    samples = [sample([1.0], rewards=10**400, response_lengths=1)]
    measured = {metric.name: metric for metric in Measuring(samples).result()}

    reward = measured.pop("reward")
    assert (means(reward), reward.missing_count) == ((None, None), 1)
    assert "OverflowError" in (reward.failure or "")
    assert means(measured["entropy"]) == (1.0, 1.0)
    assert [metric.name for metric in measured.values() if metric.failure is not None] == []


class CountedSample(dict[str, Any]):
    """A sample that knows whether it was measured."""

    is_measured = False

    def get(self, key: str, default: object = None) -> Any:
        self.is_measured = self.is_measured or key == "entropy"
        return super().get(key, default)


@given(count=st.integers(0, 9), shares=st.lists(st.floats(0, 1), max_size=5).map(sorted))
def test_samples_are_measured_share_by_share_to_what_they_are_at_once(count: int, shares: list[float]) -> None:
    samples = [CountedSample(sample([index, 1.0], rollout=index // 2, rewards=float(index))) for index in range(count)]
    measuring = Measuring(samples)
    for share in shares:
        measuring.up_to(share)
        measured = [each.is_measured for each in samples]
        assert sum(measured) == math.ceil(share * count)
        assert measured == sorted(measured, reverse=True)
    assert measuring.result() == Measuring(samples).result()
