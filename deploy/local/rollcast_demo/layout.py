"""The two parallel layouts of the demo, and which response tokens a context-parallel rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

WORLD_SIZE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Parallel sizes of one training run on `WORLD_SIZE` ranks; data parallelism takes what is left.

    Attributes:
        tensor: Tensor-parallel size.
        pipeline: Pipeline-parallel size.
        context: Context-parallel size.
    """

    tensor: int
    pipeline: int
    context: int

    @property
    def data(self) -> int:
        """Data-parallel size."""
        return WORLD_SIZE // (self.tensor * self.pipeline * self.context)

    @property
    def name(self) -> str:
        """The sizes as text, such as `tp2-pp2-cp2-dp1`; a tensor size of 1 is left out."""
        tensor = f"tp{self.tensor}-" if self.tensor > 1 else ""
        return f"{tensor}pp{self.pipeline}-cp{self.context}-dp{self.data}"


LAYOUTS = (Layout(tensor=2, pipeline=2, context=2), Layout(tensor=1, pipeline=2, context=2))


def response_spans(
    *, total_length: int, response_length: int, context_rank: int, context_size: int
) -> list[tuple[int, int]]:
    """Return the `[start, stop)` spans of response tokens that a context-parallel rank holds; empty ones are left out.

    The zigzag layout cuts a sequence into 2 * size chunks and gives rank r the chunks r and 2 * size - 1 - r. A
    response token belongs to the position whose logits predict it, which is one before its own. With size 1 the
    span is the whole response.
    """
    prompt_length = total_length - response_length
    if context_size == 1:
        return [(0, response_length)] if response_length else []
    chunk = -(-total_length // (2 * context_size))
    spans = []
    for index in (context_rank, 2 * context_size - 1 - context_rank):
        start = max(index * chunk, prompt_length - 1)
        stop = min((index + 1) * chunk, total_length - 1)
        if start < stop:
            spans.append((start - prompt_length + 1, stop - prompt_length + 1))
    return spans


def take_spans(values: torch.Tensor, spans: list[tuple[int, int]]) -> torch.Tensor:
    """Return the spans of a response tensor one after the other, as one new tensor."""
    return torch.cat([values[:0], *(values[start:stop] for start, stop in spans)])
