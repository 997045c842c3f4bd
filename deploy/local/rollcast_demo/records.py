"""Per-sample records of one rank, in the shape in which a Megatron-style trainer holds them after a rollout."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from rollcast_demo.layout import response_spans, take_spans
from rollcast_demo.learner import LossTerm, Scores
from rollcast_demo.rollout import Sample

MICRO_BATCH_SIZE = 4
_KL_COEFFICIENT = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where one rank stands, and where the rollout's numbering starts.

    Attributes:
        data_rank: Data-parallel rank.
        data_size: Data-parallel size.
        context_rank: Context-parallel rank.
        context_size: Context-parallel size.
        first_sample: Running index of the rollout's first sample.
        first_rollout: Running index of the step's first rollout.
    """

    data_rank: int
    data_size: int
    context_rank: int
    context_size: int
    first_sample: int
    first_rollout: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Records:
    """What one rank needs for the training step and for the dump.

    Attributes:
        rollout_data: The mapping that `publish` and `save_debug_train_data` take.
        loss_terms: One for each sample of the shard.
        micro_batches: Indices into the shard, one list for each micro-batch.
    """

    rollout_data: dict[str, Any]
    loss_terms: list[LossTerm]
    micro_batches: list[list[int]]


def shard_positions(sample_count: int, *, data_rank: int, data_size: int) -> list[int]:
    """Return the rollout positions that a data-parallel rank owns."""
    return list(range(data_rank, sample_count, data_size))


def build_records(samples: list[Sample], scores: list[Scores], place: Place) -> Records:
    """Return one rank's records.

    Args:
        samples: The whole rollout, in order of rollout position.
        scores: Values of this rank's shard alone, over whole responses.
        place: Where the rank stands.
    """
    positions = shard_positions(len(samples), data_rank=place.data_rank, data_size=place.data_size)
    normalized = _group_normalized_rewards(samples)
    tokens_of_rollout: Counter[int] = Counter()
    for sample in samples:
        tokens_of_rollout[sample.rollout] += 0 if sample.removed else sample.response_length
    columns: dict[str, list[torch.Tensor]] = {
        name: []
        for name in (
            "rollout_log_probs", "log_probs", "ref_log_probs", "kl", "entropy", "advantages", "returns"
        )
    }  # fmt: skip
    masks: list[torch.Tensor] = []
    terms: list[LossTerm] = []
    for position, score in zip(positions, scores, strict=True):
        sample = samples[position]
        spans = response_spans(
            total_length=len(sample.tokens),
            response_length=sample.response_length,
            context_rank=place.context_rank,
            context_size=place.context_size,
        )
        mask = torch.full((sample.response_length,), 0 if sample.removed else 1, dtype=torch.int32)
        masks.append(mask)
        reference_gap = score.ref_log_probs - score.log_probs
        kl = reference_gap.exp() - 1 - reference_gap
        returns = torch.full_like(kl, normalized[position])
        advantages = returns - _KL_COEFFICIENT * kl
        whole = {
            "rollout_log_probs": torch.tensor(sample.log_probs),
            "log_probs": score.log_probs,
            "ref_log_probs": score.ref_log_probs,
            "kl": kl,
            "entropy": score.entropy,
            "advantages": advantages,
            "returns": returns,
        }
        for name, values in whole.items():
            columns[name].append(take_spans(values, spans))
        weight = 1.0 / (max(tokens_of_rollout[sample.rollout], 1) * len(tokens_of_rollout))
        terms.append(
            LossTerm(
                spans=spans,
                advantages=columns["advantages"][-1],
                weights=take_spans(mask, spans) * weight,
            )
        )
    owned = [samples[position] for position in positions]
    micro_batches = _micro_batches(len(owned), sample_count=len(samples), data_size=place.data_size)
    rollout_data: dict[str, Any] = {
        "tokens": [torch.tensor(sample.tokens) for sample in owned],
        "total_lengths": [len(sample.tokens) for sample in owned],
        "response_lengths": [sample.response_length for sample in owned],
        "loss_masks": masks,
        "rewards": [sample.reward for sample in owned],
        "raw_reward": [sample.reward for sample in samples],
        "truncated": [int(sample.truncated) for sample in owned],
        "partition": positions,
        "sample_indices": [place.first_sample + position for position in positions],
        "rollout_ids": [place.first_rollout + sample.rollout for sample in owned],
        "micro_batch_indices": micro_batches,
        "num_microbatches": [len(micro_batches)],
        "global_batch_sizes": [len(tokens_of_rollout)],
        **columns,
    }
    return Records(rollout_data=rollout_data, loss_terms=terms, micro_batches=micro_batches)


def _group_normalized_rewards(samples: list[Sample]) -> list[float]:
    """Return each sample's reward less its group's mean, over the group's standard deviation; rollouts count once."""
    rewards = {sample.rollout: (sample.problem, sample.reward) for sample in samples}
    groups: dict[int, list[float]] = {}
    for problem, reward in rewards.values():
        groups.setdefault(problem, []).append(reward)
    result = []
    for sample in samples:
        group = groups[sample.problem]
        mean = sum(group) / len(group)
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in group) / len(group))
        result.append((sample.reward - mean) / (deviation + 1e-6))
    return result


def _micro_batches(owned_count: int, *, sample_count: int, data_size: int) -> list[list[int]]:
    """Return the shard's slots in micro-batches, as many on every rank even where shards differ by one."""
    count = -(-sample_count // (data_size * MICRO_BATCH_SIZE))
    edges = [owned_count * index // count for index in range(count + 1)]
    return [list(range(start, stop)) for start, stop in itertools.pairwise(edges)]
