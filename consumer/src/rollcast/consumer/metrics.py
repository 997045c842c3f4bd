"""Metrics of one rollout, from the samples of its dump: float64, response tokens with mask 1, two denominators."""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

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


class _Weights(NamedTuple):
    """Weights of the values of one sample, none negative; without an array each weighs 1.

    Attributes:
        array: one for each value.
        total: their sum.
        tokens: values that weigh something.
        values: that have a weight, be it 0.
    """

    array: _Floats | None
    total: float
    tokens: int
    values: int


def _each_weighs_one(values: int) -> _Weights:
    return _Weights(None, values, values, values)


@dataclass(slots=True)
class _Sums:
    """What is summed over the values of one rollout; one sample at a time, so that no copy of all values is made."""

    value: float = 0.0
    weight: float = 0.0
    tokens: int = 0
    lost: int = 0

    def add(self, values: _Floats, weights: _Weights) -> None:
        """Adds the values of one sample, with their weights."""
        # A sum beyond the range of a double becomes infinite, and the mean None.
        with np.errstate(over="ignore", invalid="ignore"):
            value = float((values if weights.array is None else values * weights.array).sum())
            if math.isfinite(value):
                self.value += value
                self.weight += weights.total
                self.tokens += weights.tokens
                return
            array = np.ones(len(values)) if weights.array is None else weights.array
            finite = np.isfinite(values)
            used = finite & (array > 0)
            self.value += float((values[used] * array[used]).sum())
        self.weight += float(array[used].sum())
        self.tokens += int(used.sum())
        self.lost += int((~finite & (array > 0)).sum())


class _Values:
    """What the metrics need of one sample, each computed once."""

    def __init__(self, sample: _Sample) -> None:
        self._sample = sample

    @cached_property
    def log_ratio(self) -> _Floats | None:
        """Training's log-probability minus the inference engine's, by token."""
        trained, sampled = self.vector("log_probs"), self.vector("rollout_log_probs")
        if trained is None or sampled is None or len(trained) != len(sampled):
            return None
        with np.errstate(invalid="ignore"):
            return np.asarray(trained - sampled)

    def vector(self, column: str) -> _Floats | None:
        return _vector(self._sample.get(column))

    def scalar(self, column: str) -> _Floats | None:
        value = _scalar(self._sample.get(column))
        return None if value is None else np.array([value])

    def weights(self, tokens: int) -> _Weights | None:
        """Returns the mask, None if it is not one of so many tokens."""
        if self._sample.get("loss_masks") is None:
            return _each_weighs_one(tokens)
        weights = self._mask
        return weights if weights is not None and weights.values == tokens else None

    @cached_property
    def _mask(self) -> _Weights | None:
        mask = self.vector("loss_masks")
        if mask is None:
            return None
        with np.errstate(invalid="ignore"):
            if (mask == 1).all():
                return _each_weighs_one(len(mask))
            array = np.where(np.isfinite(mask) & (mask > 0), mask, 0.0)
        return _Weights(array, float(array.sum()), int(np.count_nonzero(array)), len(array))


_ValuesOf = Callable[[_Values], "_Floats | None"]


class _Running:
    """One metric while the samples go by."""

    def __init__(self, name: str, values_of: _ValuesOf, *, masked: bool) -> None:
        self._name, self._values_of, self._masked = name, values_of, masked
        self._sums: defaultdict[int, _Sums] = defaultdict(_Sums)
        self._missing = 0
        self._failure: str | None = None

    def add(self, sample: _Values, rollout: int) -> None:
        if self._failure is not None:
            return
        try:
            values = self._values_of(sample)
            if values is None:
                weights = None
            else:
                weights = sample.weights(len(values)) if self._masked else _each_weighs_one(len(values))
            if values is None or weights is None:
                self._missing += 1
            else:
                self._sums[rollout].add(values, weights)
        except Exception as exc:  # noqa: BLE001 - values from outside, whatever they provoke costs their metric alone
            self._failure = brief(f"{type(exc).__name__}: {exc}")

    def result(self, samples: int) -> Metric:
        if self._failure is not None:
            return replace(_metric(self._name, None, None, 0, 0, 0, samples), failure=self._failure)
        return _aggregate(self._name, self._sums.values(), self._missing)


class Measuring:
    """Computes the metrics of the samples of one dump, sample by sample, beside other work of the same thread.

    Samples with an equal `rollout_ids` value are one rollout; a sample without it is a rollout alone. A sample
    without `loss_masks` counts with every token. Never raises: what cannot be measured is a metric with a `failure`.

    Args:
        samples: of the dump.
    """

    def __init__(self, samples: Sequence[_Sample]) -> None:
        self._running = [
            *(_Running(name, values_of, masked=True) for name, values_of in _PER_TOKEN.items()),
            *(_Running(name, values_of, masked=False) for name, values_of in _PER_SAMPLE.items()),
        ]
        self._count = len(samples)
        self._left = deque(zip(samples, _rollouts(samples), strict=True))

    def up_to(self, share: float) -> None:
        """Measures samples until this share of all, at most 1, is measured."""
        while self._left and self._count - len(self._left) < share * self._count:
            sample, rollout = self._left.popleft()
            values = _Values(sample)
            for metric in self._running:
                metric.add(values, rollout)

    def result(self) -> tuple[Metric, ...]:
        """Returns the metrics of all samples, after measuring those that are left."""
        self.up_to(1)
        return tuple(metric.result(self._count) for metric in self._running)


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


def _map(values: _Floats | None, function: Callable[[_Floats], Any]) -> _Floats | None:
    if values is None:
        return None
    with np.errstate(all="ignore"):
        return np.asarray(function(values), np.float64)


def _vector(value: object) -> _Floats | None:
    """Returns a one-dimensional tensor or list of numbers as float64, None for anything else."""
    if isinstance(value, torch.Tensor):
        if value.dim() != 1 or value.is_complex():
            return None
        return np.asarray(value.to(torch.float64).numpy())
    if isinstance(value, (list, tuple)):
        items = [_scalar(item) for item in value]
        return None if None in items else np.array(items, np.float64)
    return None


def _scalar(value: object) -> float | None:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    return float(value) if isinstance(value, (bool, int, float)) else None


_PER_TOKEN: dict[str, _ValuesOf] = {
    "train_rollout_logprob_abs_diff": lambda sample: _map(sample.log_ratio, np.abs),
    # Schulman's k3 estimator of the KL divergence, not clamped: exp(d) - 1 - d.
    # torch's exponential takes half of numpy's time.
    "k3_kl": lambda sample: _map(sample.log_ratio, lambda d: torch.expm1(torch.from_numpy(d)).numpy() - d),
    "entropy": lambda sample: sample.vector("entropy"),
    "advantage": lambda sample: sample.vector("advantages"),
}

_PER_SAMPLE: dict[str, _ValuesOf] = {
    "reward": lambda sample: sample.scalar("rewards"),
    "response_length": lambda sample: sample.scalar("response_lengths"),
}
