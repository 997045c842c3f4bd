"""The toy task: walk through the digits from one waypoint to the next, with a checkable answer.

`"3>6>5="` asks for every digit on the way, `"34565"`. Answers differ in length, an unfinished answer earns partial
credit, and a tiny model learns it in seconds, so that rewards and advantages move within a few rollouts.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

END = "$"
_CHARACTERS = "_" + END + "0123456789>="
_IDS = {character: index for index, character in enumerate(_CHARACTERS)}
PADDING_ID = 0
END_ID = _IDS[END]
VOCABULARY_SIZE = len(_CHARACTERS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A prompt and its only right answer.

    Attributes:
        prompt: The waypoints, such as `"3>6="`.
        answer: Every digit on the way, without the end character.
    """

    prompt: str
    answer: str


def encode(text: str) -> list[int]:
    """Return the token ids of a text, one for each character."""
    return [_IDS[character] for character in text]


def decode(token_ids: list[int]) -> str:
    """Return the text of token ids, the end character included."""
    return "".join(_CHARACTERS[token_id] for token_id in token_ids)


def walk(waypoints: list[int]) -> Problem:
    """Return the problem that visits the waypoints in order."""
    visited = waypoints[:1]
    for waypoint in waypoints[1:]:
        step = 1 if waypoint >= visited[-1] else -1
        visited.extend(range(visited[-1] + step, waypoint + step, step) if waypoint != visited[-1] else [])
    return Problem(prompt=">".join(map(str, waypoints)) + "=", answer="".join(map(str, visited)))


def score(problem: Problem, response: str) -> float:
    """Return the reward of a response, from 0.0 to 1.0: its right beginning over the longer of both texts."""
    wanted = problem.answer + END
    right = 0
    for got, expected in zip(response, wanted, strict=False):
        if got != expected:
            break
        right += 1
    return right / max(len(wanted), len(response))


def practice_problem(generator: random.Random) -> Problem:
    """Return one problem of the supervised warm-up."""
    return walk([generator.randrange(10) for _ in range(generator.randint(1, 5))])


# The training set, seen once in every rollout. The first walk is long, so that its responses are cut and continued.
# The second stays where it is: a long prompt with a short answer leaves some context-parallel rank without a single
# response token.
PROBLEMS = (walk([0, 9, 5]), walk([4] * 6), walk([2, 7]), walk([8, 3, 5]), walk([6, 1]))
