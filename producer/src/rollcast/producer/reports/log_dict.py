"""The metrics of a whole rollout, gathered from all ranks before they are logged."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist

from rollcast.producer.errors import ProducerError, RolloutDataError


def rollout_log_metric_contribution(
    per_rank_reducer_sum: float | torch.Tensor, *, cp_size: int, num_rollouts_in_rollout: int, dp_size: int
) -> tuple[float, float]:
    """Returns `(sum, count)` of one rank, for `gather_and_reduce_log_dict` over data- and context-parallel ranks.

    The sums of all ranks divided by all counts are the mean over rollouts that training reports: both are
    `cp_size` times too large, since a shard's count is given by each of its context-parallel ranks.

    Args:
        per_rank_reducer_sum: what the reducer gave on this rank, over all its samples.
        cp_size: context-parallel size.
        num_rollouts_in_rollout: number of rollouts (groups of samples) that are averaged, over all ranks.
        dp_size: number of data-parallel shards, context parallelism left aside.
    """
    return cp_size * float(per_rank_reducer_sum), num_rollouts_in_rollout / dp_size


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
        dp_group: group of the ranks whose metrics are put together, gloo; not used where `dp_size` is 1.

    Raises:
        RolloutDataError: a value is not a number or pair of numbers; the message names rank and key.
        ProducerError: size or source rank are not those of the group.
    """
    own = _checked(log_dict)
    if dp_size == 1:
        reduced = _reduce([own], [dist.get_rank() if dist.is_initialized() else 0])
        return reduced
    ranks = dist.get_process_group_ranks(dp_group)
    if len(ranks) != dp_size or dp_src_rank not in ranks:
        raise ProducerError(
            f"dp_size is {dp_size} and dp_src_rank {dp_src_rank}, but the group has the ranks {ranks}; "
            "take all three from the same group"
        )
    everyone: list[Any] = [None] * dp_size
    # To all, not only to the source: every rank must see what another one did wrong.
    dist.all_gather_object(everyone, own, group=dp_group)
    reduced = _reduce(everyone, ranks)
    return reduced if dist.get_rank() == dp_src_rank else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Checked:
    """One rank's log dict: plain numbers and pairs apart, or why it cannot be used."""

    plain: dict[str, float]
    pairs: dict[str, tuple[float, float]]
    complaint: str | None = None


def _checked(log_dict: Mapping[str, Any]) -> _Checked:
    result = _Checked(plain={}, pairs={})
    for key, value in log_dict.items():
        is_pair = isinstance(value, tuple) and len(value) == 2
        numbers = [_number(part) for part in (value if is_pair else (value,))]
        # Written so that a count that is NaN is refused too.
        if None in numbers or (is_pair and not numbers[1] >= 0):
            return _Checked(
                plain={},
                pairs={},
                complaint=f"metric {key!r} is {_shortened(value)}; give a number, or (sum, count) with a count from 0",
            )
    return result


def _number(value: object) -> float | None:
    if not isinstance(value, Real | torch.Tensor):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # several elements, complex, beyond float
        return None
