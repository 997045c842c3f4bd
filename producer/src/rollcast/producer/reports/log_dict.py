"""The metrics of a whole rollout, gathered from all ranks before they are logged."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from rollcast.producer.errors import ProducerError, RolloutDataError


def rollout_log_metric_contribution(
    per_rank_reducer_sum: float | torch.Tensor, *, cp_size: int, num_rollouts_in_rollout: int, dp_size: int
) -> tuple[float, float]:
    """Returns `(sum, count)` of one rank, for `gather_and_reduce_log_dict` over data- and context-parallel ranks.

    The sums of all ranks divided by all counts are the mean over rollouts that training reports. Both totals are
    `cp_size` times too large: the count of a shard is given by each of its context-parallel ranks.

    Args:
        per_rank_reducer_sum: what the reducer gave on this rank, over all its samples.
        cp_size: context-parallel size.
        num_rollouts_in_rollout: how many rollouts, in the sense of sample groups, all ranks together hold.
        dp_size: number of data-parallel shards, context parallelism left aside.
    """
    return cp_size * float(per_rank_reducer_sum), num_rollouts_in_rollout / dp_size


@dataclass(frozen=True, slots=True)
class _Entry:
    """One metric of one rank; a plain value counts as one."""

    is_pair: bool
    sum: float
    count: float


_Report: TypeAlias = dict[str, _Entry] | str
"""The metrics of a rank, or what is wrong with them."""


def gather_and_reduce_log_dict(
    log_dict: Mapping[str, Any], *, dp_size: int, dp_src_rank: int, dp_group: Any
) -> dict[str, float] | None:
    """Returns the metrics of all ranks on `dp_src_rank`, None elsewhere; collective over the group.

    A `(sum, count)` pair becomes the sum of sums by the sum of counts, a plain value the mean over the ranks that
    have it. Keys may differ among ranks. A pair whose counts are all 0 is left out. All ranks raise when one of them
    has unusable data, none waits for it.

    Args:
        log_dict: this rank's metrics, numbers or pairs of numbers.
        dp_size: number of ranks in the group.
        dp_src_rank: global rank that gets the result.
        dp_group: the ranks whose metrics are put together, over gloo; not used where `dp_size` is 1.

    Raises:
        RolloutDataError: a value is not a number or pair of numbers, or a pair on one rank and plain on another; the
            message names rank and key.
        ProducerError: size or source rank are not those of the group.
    """
    own = _report(log_dict)
    if dp_size == 1:
        return _reduce([own], [dp_src_rank])
    ranks = dist.get_process_group_ranks(dp_group)
    if len(ranks) != dp_size or dp_src_rank not in ranks:
        raise ProducerError(
            f"dp_size is {dp_size} and dp_src_rank {dp_src_rank}, but the group has the ranks {ranks}; "
            "take all three from the same group"
        )
    reports: list[Any] = [None] * dp_size
    # To all, not only to the source: every rank must learn what is wrong with another one's metrics.
    dist.all_gather_object(reports, own, group=dp_group)
    reduced = _reduce(reports, ranks)
    return reduced if dist.get_rank() == dp_src_rank else None


def _report(log_dict: Mapping[str, Any]) -> _Report:
    entries: dict[str, _Entry] = {}
    for key, value in log_dict.items():
        is_pair = isinstance(value, tuple) and len(value) == 2
        total = _number(value[0] if is_pair else value)
        count = _number(value[1]) if is_pair else 1.0
        # Not `count < 0`: a count that is NaN is refused too.
        if not isinstance(key, str) or total is None or count is None or not count >= 0:
            return f"metric {key!r} is {repr(value)[:100]}; give a number, or a pair of a sum and a count from 0"
        entries[key] = _Entry(is_pair, total, count)
    return entries


def _number(value: object) -> float | None:
    if not isinstance(value, Real | torch.Tensor):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # complex, too large, or not one element
        return None


def _reduce(reports: Sequence[_Report], ranks: Sequence[int]) -> dict[str, float]:
    totals: dict[str, _Entry] = {}
    for rank, report in zip(ranks, reports, strict=True):
        if isinstance(report, str):
            raise RolloutDataError(f"the log dict of rank {rank} cannot be used: {report}")
        for key, entry in report.items():
            before = totals.get(key, _Entry(entry.is_pair, 0.0, 0.0))
            if before.is_pair != entry.is_pair:
                raise RolloutDataError(
                    f"metric {key!r} is {'a pair' if entry.is_pair else 'a plain value'} on rank {rank} but not on "
                    "ranks before it; report it the same way on all"
                )
            totals[key] = _Entry(entry.is_pair, before.sum + entry.sum, before.count + entry.count)
    return {key: entry.sum / entry.count for key, entry in totals.items() if entry.count > 0}
