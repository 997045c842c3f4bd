"""The metrics of one training step, from what the loss function logged for each micro-batch."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rollcast.producer.errors import RolloutDataError
from rollcast.schemas.sizes import counted


def reduce_train_step_metrics(
    losses_reduced: Sequence[Mapping[str, Any]],
    *,
    calculate_per_token_loss: bool,
    step_global_batch_size: int,
    cp_size: int,
    dp_with_cp_group: Any,
) -> dict[str, float]:
    """Returns each metric of a training step, the same on every rank of the group; collective over it.

    The values are added up over micro-batches and ranks, then divided by the number of rollouts of the step or, per
    token, by the number of tokens; without any token there is no metric. A NaN stays within its own metric. All ranks
    raise when one of them has unusable data, none waits for it.

    Args:
        losses_reduced: one item per micro-batch, `{"keys": [...], "values": tensor}`; `values` holds the number of
            tokens under the mask, whole samples counted, then one sum for each key.
        calculate_per_token_loss: divide by tokens, not by rollouts.
        step_global_batch_size: rollouts of the step, over all ranks.
        cp_size: context-parallel size: so many ranks count the tokens of the same sample.
        dp_with_cp_group: data- and context-parallel ranks together; None: no other rank takes part.

    Raises:
        RolloutDataError: no micro-batch, keys and values that do not match, different keys among micro-batches or
            ranks, or no rollout to divide by.
    """
    keys: list[str] = []
    values = torch.zeros(1)
    fault: RolloutDataError | None = None
    try:
        if step_global_batch_size < 1:
            raise RolloutDataError(
                f"step_global_batch_size is {step_global_batch_size}; it is the number of rollouts of the step"
            )
        keys, values = _sum_micro_batches(losses_reduced)
    except RolloutDataError as exc:
        fault = exc
    except Exception as exc:  # noqa: BLE001  # whatever it is, the peers are waiting for this rank's vote
        fault = RolloutDataError(f"losses_reduced cannot be added up: {exc!r}")
    if dp_with_cp_group is not None:
        # Ranks that disagree on the size of what they add up would hang or mix up each other's metrics.
        fault = _agree(fault, keys, dp_with_cp_group)
    if fault is not None:
        raise fault
    if dp_with_cp_group is not None:
        values = values.to(_collective_device(dp_with_cp_group))
        dist.all_reduce(values, group=dp_with_cp_group)
    tokens, *sums = values.tolist()
    if not calculate_per_token_loss:
        return {key: value / step_global_batch_size for key, value in zip(keys, sums, strict=True)}
    if tokens == 0:
        return {}
    return {key: value * cp_size / tokens for key, value in zip(keys, sums, strict=True)}


def _sum_micro_batches(losses_reduced: Sequence[Mapping[str, Any]]) -> tuple[list[str], torch.Tensor]:
    keys: list[str] | None = None
    total: torch.Tensor | None = None
    for index, item in enumerate(losses_reduced):
        item_keys, values = list(item.get("keys", ())), item.get("values")
        if not isinstance(values, torch.Tensor) or values.shape != (len(item_keys) + 1,):
            found = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
            raise RolloutDataError(
                f"micro-batch {index} has {counted(len(item_keys), 'metric key')} and values of {found}; "
                "give a tensor with the token count and one value per key"
            )
        # A float32 count of tokens is inexact from 2**24 on.
        values = values.detach().double()
        if total is None:
            keys, total = item_keys, values
        elif item_keys == keys:
            total = total + values
        else:
            raise RolloutDataError(f"micro-batch {index} has the metric keys {item_keys}, the ones before it {keys}")
    if keys is None or total is None:
        raise RolloutDataError("losses_reduced is empty: call this on the last pipeline stage, after the step")
    return keys, total


def _agree(fault: RolloutDataError | None, keys: Sequence[str], group: Any) -> RolloutDataError | None:
    """Returns None if every rank can go on with the same keys, else what this rank raises; the first collective."""
    digest = int.from_bytes(hashlib.blake2b(repr(list(keys)).encode(), digest_size=7).digest(), "big")
    vote = torch.tensor([dist.get_rank() if fault else -1, digest, -digest], device=_collective_device(group))
    dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=group)
    faulty_rank, highest, negated_lowest = vote.tolist()
    if fault is not None:
        return fault
    if faulty_rank >= 0:
        return RolloutDataError(f"the metrics of this step are lost: rank {faulty_rank} has unusable losses_reduced")
    if highest != -negated_lowest:
        return RolloutDataError(
            f"the ranks report different metric keys, or in different order; rank {dist.get_rank()} has {list(keys)}"
        )
    return None


def _collective_device(group: Any) -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend(group) else torch.device("cpu")
    )
