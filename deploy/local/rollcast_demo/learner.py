"""The model under training: supervised warm-up, float32 re-scoring and the policy-gradient step of one rank."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import Tensor

from rollcast_demo import task
from rollcast_demo.layout import take_spans
from rollcast_demo.model import TinyLanguageModel
from rollcast_demo.rollout import Sample, pad

_WARM_UP_BATCH = 32
_IGNORED = -100


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Float32 values of one sample's response tokens.

    Attributes:
        log_probs: Log-probabilities under the weights that are about to be trained.
        ref_log_probs: Log-probabilities under the frozen first weights.
        entropy: Entropies in nats.
    """

    log_probs: Tensor
    ref_log_probs: Tensor
    entropy: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTerm:
    """What one sample adds to the loss on one context-parallel rank.

    Attributes:
        spans: Response spans of this rank.
        advantages: Advantages inside these spans.
        weights: Loss mask inside these spans, divided by the rollout's number of tokens in the whole step and by the
            step's number of rollouts. The sum over all ranks is then the mean over rollouts of token means.
    """

    spans: list[tuple[int, int]]
    advantages: Tensor
    weights: Tensor


class Learner:
    """Holds the weights, their frozen first state and the optimizer; every rank has an equal one.

    Args:
        seed: Seed of the first weights and of the warm-up problems.
        learning_rate: Learning rate of the policy-gradient steps.
    """

    def __init__(self, *, seed: int, learning_rate: float) -> None:
        torch.manual_seed(seed)
        self._seed = seed
        self._learning_rate = learning_rate
        self.model = TinyLanguageModel()
        self._remember()

    def warm_up(self, steps: int) -> None:
        """Train on right answers for a few steps, so that sampling is better than noise but far from perfect."""
        generator = random.Random(self._seed)  # noqa: S311 - toy problems, nothing secret
        optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        for _ in range(steps):
            problems = [task.practice_problem(generator) for _ in range(_WARM_UP_BATCH)]
            tokens = pad([task.encode(problem.prompt + problem.answer + task.END) for problem in problems])
            targets = torch.full_like(tokens, _IGNORED)
            for row, problem in enumerate(problems):
                start, stop = len(problem.prompt), len(problem.prompt) + len(problem.answer) + 1
                targets[row, start - 1 : stop - 1] = tokens[row, start:stop]
            loss = functional.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten(), ignore_index=_IGNORED)
            optimizer.zero_grad()
            torch.autograd.backward([loss])
            optimizer.step()

    def share_weights(self) -> None:
        """Take the weights of global rank 0 on every rank, and make them the reference. Collective."""
        for parameter in self.model.parameters():
            dist.broadcast(parameter.data, src=0)
        self._remember()

    def restore_first_weights(self) -> None:
        """Go back to the weights of `share_weights`, with a fresh optimizer."""
        self.model = copy.deepcopy(self._reference).requires_grad_(True)
        self._remember()

    @torch.no_grad()
    def score(self, samples: list[Sample]) -> list[Scores]:
        """Return the values of every response token of each sample, one forward pass of each model for all."""
        if not samples:
            return []
        tokens = pad([sample.tokens for sample in samples])
        distribution = torch.log_softmax(self.model(tokens), dim=-1)
        reference = torch.log_softmax(self._reference(tokens), dim=-1)
        entropy = -(distribution.exp() * distribution).sum(-1)
        return [
            Scores(
                log_probs=_response_log_probs(distribution[row], sample),
                ref_log_probs=_response_log_probs(reference[row], sample),
                entropy=entropy[row, len(sample.tokens) - sample.response_length - 1 : len(sample.tokens) - 1],
            )
            for row, sample in enumerate(samples)
        ]

    def accumulate(self, samples: list[Sample], terms: list[LossTerm]) -> None:
        """Add the gradient of one micro-batch, of this rank's response spans alone."""
        distribution = torch.log_softmax(self.model(pad([sample.tokens for sample in samples])), dim=-1)
        loss = torch.zeros(())
        for row, (sample, term) in enumerate(zip(samples, terms, strict=True)):
            log_probs = take_spans(_response_log_probs(distribution[row], sample), term.spans)
            loss = loss - (log_probs * term.advantages * term.weights).sum()
        torch.autograd.backward([loss])

    def step(self, group: dist.ProcessGroup) -> None:
        """Add up the gradients of all data- and context-parallel ranks and update the weights. Collective."""
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in self.model.parameters()
        ]
        summed = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(summed, group=group)
        parts = torch.split(summed, [gradient.numel() for gradient in gradients])
        for parameter, part in zip(self.model.parameters(), parts, strict=True):
            parameter.grad = part.view_as(parameter)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _remember(self) -> None:
        self._reference = copy.deepcopy(self.model).requires_grad_(False)
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=self._learning_rate)


def _response_log_probs(distribution: Tensor, sample: Sample) -> Tensor:
    """Return the log-probability of each response token from one row of log-softmax values."""
    start, stop = len(sample.tokens) - sample.response_length, len(sample.tokens)
    chosen = torch.tensor(sample.tokens[start:stop]).unsqueeze(1)
    return distribution[start - 1 : stop - 1].gather(1, chosen).squeeze(1)
