"""The rollout engine: samples responses in bf16 and grades them, as an inference server beside the trainer would."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch

from rollcast_demo import task
from rollcast_demo.model import TinyLanguageModel

GROUP_SIZE = 4
RESPONSE_LIMIT = 12
# The first problem's responses are interrupted this early, as engines with partial rollouts do with long ones.
INTERRUPTED_LIMIT = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One sampled response.

    Attributes:
        tokens: Prompt and response.
        response_length: How many of the tokens are the response.
        log_probs: The engine's log-probability of each response token, taken from the bf16 weights.
        problem: Index of the prompt; samples of one prompt are a group.
        rollout: Index of the rollout inside this step; samples of one rollout share its reward.
        truncated: The response hit the length limit before it ended.
        removed: Graded, but withheld from the loss: its mask is all 0.
        reward: Reward of the rollout it belongs to.
    """

    tokens: list[int]
    response_length: int
    log_probs: list[float]
    problem: int
    rollout: int
    truncated: bool
    removed: bool
    reward: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Response:
    """What the engine generated for one prompt."""

    tokens: list[int]
    log_probs: list[float]

    @property
    def truncated(self) -> bool:
        return self.tokens[-1] != task.END_ID


class RolloutEngine:
    """Samples with temperature 1 from a bf16 copy of the weights that it is given for each rollout.

    Args:
        seed: Seed of the sampling.
    """

    def __init__(self, *, seed: int) -> None:
        self._sampling = torch.Generator().manual_seed(seed)

    def generate(self, model: TinyLanguageModel) -> list[Sample]:
        """Return the graded samples of the next rollout step, in order of their rollout position.

        A truncated response is continued once, as a further sample of the same rollout; its prompt is all that came
        before.
        """
        engine_model = copy.deepcopy(model).to(torch.bfloat16)
        grouped = [problem for problem in task.PROBLEMS for _ in range(GROUP_SIZE)]
        prompts = [task.encode(problem.prompt) for problem in grouped]
        limits = [INTERRUPTED_LIMIT if problem is task.PROBLEMS[0] else RESPONSE_LIMIT for problem in grouped]
        first = self._respond(engine_model, prompts, limits)
        cut = [index for index, response in enumerate(first) if response.truncated]
        continued = self._respond(
            engine_model, [prompts[index] + first[index].tokens for index in cut], [RESPONSE_LIMIT] * len(cut)
        )
        second = dict(zip(cut, continued, strict=True))

        samples: list[Sample] = []
        for rollout, problem in enumerate(grouped):
            responses = [first[rollout], *([second[rollout]] if rollout in second else [])]
            whole = [token for response in responses for token in response.tokens]
            reward = task.score(problem, task.decode(whole))
            prompt = prompts[rollout]
            for response in responses:
                samples.append(
                    Sample(
                        tokens=prompt + response.tokens,
                        response_length=len(response.tokens),
                        log_probs=response.log_probs,
                        problem=rollout // GROUP_SIZE,
                        rollout=rollout,
                        truncated=response.truncated,
                        # One rollout of each step is withheld, as a trainer does whose sandbox failed.
                        removed=rollout == len(grouped) - 1,
                        reward=reward,
                    )
                )
                prompt = prompt + response.tokens
        return samples

    @torch.no_grad()
    def _respond(self, model: TinyLanguageModel, prompts: list[list[int]], limits: list[int]) -> list[_Response]:
        """Return one sampled response for each prompt, at most its limit long."""
        responses = [_Response(tokens=[], log_probs=[]) for _ in prompts]
        unfinished = list(range(len(prompts)))
        while unfinished:
            rows = [prompts[index] + responses[index].tokens for index in unfinished]
            last = torch.tensor([len(row) - 1 for row in rows])
            logits = model(pad(rows))[torch.arange(len(rows)), last]
            log_probs = torch.log_softmax(logits.float(), dim=-1)
            drawn = torch.multinomial(log_probs.exp(), 1, generator=self._sampling)
            chosen = log_probs.gather(1, drawn)
            for row, index in enumerate(unfinished):
                responses[index].tokens.append(int(drawn[row]))
                responses[index].log_probs.append(float(chosen[row]))
            unfinished = [
                index
                for index in unfinished
                if responses[index].truncated and len(responses[index].tokens) < limits[index]
            ]
        return responses


def pad(rows: list[list[int]]) -> torch.Tensor:
    """Return the rows as one tensor `[rows, longest]`, padded on the right."""
    longest = max(map(len, rows))
    return torch.tensor([row + [task.PADDING_ID] * (longest - len(row)) for row in rows])
