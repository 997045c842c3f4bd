"""Metrics of one rollout, from the samples of its dump: float64, response tokens with mask 1, two denominators."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollcast.consumer.brief import brief

_Floats = npt.NDArray[np.float64]
_Sample = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One metric of one rollout batch.

    A mean is None where nothing could be measured, never NaN.

    Attributes:
        name: of the metric.
        per_rollout_mean: mean over rollouts, each weighing the same.
        per_token_mean: mean over tokens (over samples, for a per-sample quantity), each weighing the same.
        rollout_count: rollouts in the first mean.
        token_count: tokens (or samples) in the second mean.
        non_finite_count: values under the mask that are NaN or infinite, left out of both.
        missing_count: samples without a usable value, left out of both.
        failure: why the metric could not be computed from what the samples hold; None otherwise.
    """

    name: str
    per_rollout_mean: float | None
    per_token_mean: float | None
    rollout_count: int
    token_count: int
    non_finite_count: int
    missing_count: int
    failure: str | None = None

    def as_json(self) -> dict[str, float | int | str | None]:
        """Returns everything but the name."""
        return {name: getattr(self, name) for name in type(self).__slots__ if name != "name"}


@dataclass(slots=True)
class _Sums:
    """What is summed over the values of one rollout; one sample at a time, so that no copy of all values is made."""

    value: float = 0.0
    weight: float = 0.0
    tokens: int = 0
    lost: int = 0

    def add(self, values: _Floats, weights: _Floats) -> None:
        """Adds the values of one sample, with their weights."""
        finite = np.isfinite(values)
        used = finite & (weights > 0)
        # A sum beyond the range of a double becomes infinite, and the mean None.
        with np.errstate(over="ignore", invalid="ignore"):
            self.value += float((values[used] * weights[used]).sum())
            self.weight += float(weights[used].sum())
        self.tokens += int(used.sum())
        self.lost += int((~finite & (weights > 0)).sum())


def compute_metrics(samples: Sequence[_Sample]) -> tuple[Metric, ...]:
    """Returns the metrics of the samples of one dump.

    Samples with an equal `rollout_ids` value are one rollout; a sample without it is a rollout alone. A sample
    without `loss_masks` counts with every token. Never raises: what cannot be measured is a metric with a `failure`.
    """
    return tuple(_measure(name, measure, samples) for name, measure in _METRICS.items())


def _measure(
    name: str, measure: Callable[[str, Sequence[_Sample], Sequence[int]], Metric], samples: Sequence[_Sample]
) -> Metric:
    try:
        return measure(name, samples, _rollouts(samples))
    except Exception as exc:  # noqa: BLE001 - values from outside, whatever they provoke costs their metric alone
        failure = brief(f"{type(exc).__name__}: {exc}")
        return replace(_metric(name, None, None, 0, 0, 0, len(samples)), failure=failure)


def _rollouts(samples: Sequence[_Sample]) -> list[int]:
    numbers: dict[object, int] = {}
    result = []
    for index, sample in enumerate(samples):
        value = sample.get("rollout_ids")
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        key = ("rollout", value) if isinstance(value, (int, str)) else ("alone", index)
        result.append(numbers.setdefault(key, len(numbers)))
    return result


def _per_token(
    name: str, samples: Sequence[_Sample], rollouts: Sequence[int], values_of: Callable[[_Sample], _Floats | None]
) -> Metric:
    sums: defaultdict[int, _Sums] = defaultdict(_Sums)
    missing = 0
    for sample, rollout in zip(samples, rollouts, strict=True):
        values = values_of(sample)
        mask = _mask(sample, len(values)) if values is not None else None
        if values is None or mask is None or len(mask) != len(values):
            missing += 1
        else:
            sums[rollout].add(values, mask)
    return _aggregate(name, sums.values(), missing)


def _per_sample(name: str, samples: Sequence[_Sample], rollouts: Sequence[int], column: str) -> Metric:
    sums: defaultdict[int, _Sums] = defaultdict(_Sums)
    missing = 0
    for sample, rollout in zip(samples, rollouts, strict=True):
        value = _scalar(sample.get(column))
        if value is None:
            missing += 1
        else:
            sums[rollout].add(np.array([value]), np.ones(1))
    return _aggregate(name, sums.values(), missing)


def _aggregate(name: str, rollouts: Collection[_Sums], missing: int) -> Metric:
    token_count, lost = sum(sums.tokens for sums in rollouts), sum(sums.lost for sums in rollouts)
    if not token_count:
        return _metric(name, None, None, 0, 0, lost, missing)
    # A rollout whose every token is masked counts as 0; one whose every value is non-finite does not count.
    counted = [sums for sums in rollouts if sums.weight > 0 or not sums.lost]
    per_rollout = sum(sums.value / max(sums.weight, 1.0) for sums in counted) / len(counted)
    per_token = sum(sums.value for sums in rollouts) / sum(sums.weight for sums in rollouts)
    return _metric(name, per_rollout, per_token, len(counted), token_count, lost, missing)


def _metric(
    name: str, per_rollout: float | None, per_token: float | None, rollouts: int, tokens: int, lost: int, missing: int
) -> Metric:
    return Metric(
        name=name,
        per_rollout_mean=_finite(per_rollout),
        per_token_mean=_finite(per_token),
        rollout_count=rollouts,
        token_count=tokens,
        non_finite_count=lost,
        missing_count=missing,
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _log_ratio(sample: _Sample) -> _Floats | None:
    trained, sampled = _vector(sample.get("log_probs")), _vector(sample.get("rollout_log_probs"))
    if trained is None or sampled is None or len(trained) != len(sampled):
        return None
    with np.errstate(invalid="ignore"):
        return np.asarray(trained - sampled)


def _map(values: _Floats | None, function: Callable[[_Floats], Any]) -> _Floats | None:
    if values is None:
        return None
    with np.errstate(all="ignore"):
        return np.asarray(function(values), np.float64)


def _mask(sample: _Sample, tokens: int) -> _Floats | None:
    mask = sample.get("loss_masks")
    weights = np.ones(tokens) if mask is None else _vector(mask)
    return None if weights is None else np.where(np.isfinite(weights), weights, 0.0)


def _vector(value: object) -> _Floats | None:
    """Returns a one-dimensional tensor or list of numbers as float64, None for anything else."""
    if isinstance(value, torch.Tensor):
        if value.dim() != 1 or value.is_complex():
            return None
        return np.asarray(value.to(torch.float64).numpy())
    if isinstance(value, (list, tuple)):
        items = [_scalar(item) for item in value]
        return np.array(items, np.float64) if _all_numbers(items) else None
    return None


def _all_numbers(items: Iterable[float | None]) -> bool:
    return all(item is not None for item in items)


def _scalar(value: object) -> float | None:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    return float(value) if isinstance(value, (bool, int, float)) else None


_METRICS: dict[str, Callable[[str, Sequence[_Sample], Sequence[int]], Metric]] = {
    "train_rollout_logprob_abs_diff": partial(_per_token, values_of=lambda sample: _map(_log_ratio(sample), np.abs)),
    # Schulman's k3 estimator of the KL divergence, not clamped: exp(d) - 1 - d.
    "k3_kl": partial(_per_token, values_of=lambda sample: _map(_log_ratio(sample), lambda d: np.expm1(d) - d)),
    "entropy": partial(_per_token, values_of=lambda sample: _vector(sample.get("entropy"))),
    "advantage": partial(_per_token, values_of=lambda sample: _vector(sample.get("advantages"))),
    "reward": partial(_per_sample, column="rewards"),
    "response_length": partial(_per_sample, column="response_lengths"),
}
