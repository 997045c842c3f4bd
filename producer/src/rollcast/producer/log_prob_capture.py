"""Keeps the log-probs that the training forward pass computes anyway, so that they need not be computed again."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rollcast.producer.errors import RolloutDataError
from rollcast.schemas.shards import as_list
from rollcast.schemas.sizes import counted


class CapturedLogProbs:
    """Log-probs of the current policy, by rollout position.

    Attributes:
        by_position: detached copies, one tensor per sample; the first occurrence of a position wins, for only the
            first pass over a sample is that of the policy before the update.
    """

    def __init__(self) -> None:
        self.by_position: dict[int, torch.Tensor] = {}

    def add(self, positions: Sequence[int | None], log_probs: Sequence[torch.Tensor]) -> None:
        """Takes one micro-batch.

        Raises:
            RolloutDataError: not one position for each tensor.
        """
        if len(positions) != len(log_probs) or None in positions:
            raise RolloutDataError(
                f"batch['partition'] has {counted(len(positions), 'position')} ({positions.count(None)} of them None) "
                f"for {counted(len(log_probs), 'log-prob tensor')}; the capture needs one position per tensor"
            )
        for position, tensor in zip(positions, log_probs, strict=True):
            if position is not None and position not in self.by_position:
                self.by_position[position] = tensor.detach().clone()

    def place_into(self, rollout_data: dict[str, Any]) -> None:
        """Sets `rollout_data["log_probs"]` to the captured tensors in the order of its `partition`.

        Raises:
            RolloutDataError: it has no partition, or a position was never captured.
        """
        positions = as_list("partition", rollout_data.get("partition"))
        if positions is None:
            raise RolloutDataError("rollout_data has no 'partition'; captured log-probs are placed by it")
        missing = [position for position in positions if position not in self.by_position]
        if missing:
            raise RolloutDataError(
                f"no log-probs were captured for {len(missing)} of {counted(len(positions), 'position')} "
                f"(first: {missing[0]}); call maybe_capture_log_probs in every forward pass of the step"
            )
        rollout_data["log_probs"] = [self.by_position[position] for position in positions if position is not None]


# A module's state, because megatron calls the loss function that captures with no object of ours in hand.
_capturing: CapturedLogProbs | None = None


def enable_log_prob_capture() -> None:
    """Starts to capture, from nothing; goes on until `drain_captured_log_probs`."""
    global _capturing
    _capturing = CapturedLogProbs()


def drain_captured_log_probs() -> dict[int, torch.Tensor]:
    """Returns what was captured, by rollout position, and stops capturing; empty where nothing was enabled."""
    global _capturing
    captured, _capturing = _capturing, None
    return captured.by_position if captured is not None else {}


def maybe_capture_log_probs(batch: Mapping[str, Any], log_probs: Sequence[torch.Tensor]) -> None:
    """Captures a micro-batch, to be called in the loss function; does nothing at all unless enabled.

    Args:
        batch: the micro-batch; `batch["partition"]` has the rollout position of each sample.
        log_probs: one tensor per sample, as this rank holds it.

    Raises:
        RolloutDataError: enabled, and not one position for each tensor.
    """
    if _capturing is not None:
        _capturing.add(as_list("partition", batch.get("partition")) or [], log_probs)


@contextmanager
def capture_log_probs() -> Iterator[CapturedLogProbs]:
    """Captures within the `with` block, and leaves no state behind, whatever happens in it.

    Captured is what the loss function gives in the block: it must call `maybe_capture_log_probs(batch, log_probs)` for
    each micro-batch, where `batch["partition"]` has the rollout position of each sample.
    """
    global _capturing
    outer, _capturing = _capturing, CapturedLogProbs()
    try:
        yield _capturing
    finally:
        _capturing = outer
