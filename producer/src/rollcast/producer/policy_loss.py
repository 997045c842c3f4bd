"""Streams what one call of the policy loss saw, to find the step at which training and inference part."""

from collections.abc import Sequence
from typing import Any

import torch

from rollcast.producer.publisher import Publisher
from rollcast.producer.result import PublishResult

POLICY_LOSS = "policy-loss"
"""Kind of the streams of policy-loss calls."""


def publish_policy_loss_call(
    publisher: Publisher,
    *,
    train_log_probs: Sequence[torch.Tensor],
    old_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor] | None,
    advantages: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    ppo_kl: torch.Tensor,
    pg_loss: torch.Tensor,
) -> PublishResult:
    """Hands one call over; for ranks of the last stage and first tensor-parallel rank, others return at once.

    The calls of a rank are numbered from 0 in each attempt; the consumer writes each one as
    `policy_loss_debug/rank_<rank>_call_<number>.pt` beside the run's dumps. Peers are not asked and nobody waits.

    Args:
        publisher: of this rank.
        train_log_probs: of the policy that is trained, one tensor per sample: this rank's tokens, as are the others.
        old_log_probs: of the policy before the update.
        rollout_log_probs: of the inference engine; None where it gave none.
        advantages: of each token.
        loss_masks: of this rank's tokens.
        ppo_kl: scalar.
        pg_loss: scalar.

    Raises:
        ProducerError: only with a strict publisher.
    """

    def call() -> dict[str, Any]:
        reference = rollout_log_probs if rollout_log_probs is not None else old_log_probs
        return {
            "response_lengths": [len(tensor) for tensor in train_log_probs],
            "train_log_probs": list(train_log_probs),
            "old_log_probs": list(old_log_probs),
            "rollout_log_probs": None if rollout_log_probs is None else list(rollout_log_probs),
            "advantages": list(advantages),
            "local_loss_masks": list(loss_masks),
            "log_prob_abs_diff": [
                (train.detach() - other.detach()).abs() for train, other in zip(train_log_probs, reference, strict=True)
            ],
            "ppo_kl": float(ppo_kl.detach()),
            "pg_loss": float(pg_loss.detach()),
            "ppo_kl_is_finite": bool(ppo_kl.detach().isfinite()),
            "pg_loss_is_finite": bool(pg_loss.detach().isfinite()),
        }

    return publisher.publish_alone(POLICY_LOSS, call)
