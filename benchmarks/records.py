"""Records like the demo's at the lengths of a real run: the demo's own columns, filled from softmaxes of logits."""

import random
from typing import Any

import torch

from rollcast.producer.parallel import ParallelLayout
from rollcast_demo.learner import Scores
from rollcast_demo.records import Place, build_records, shard_positions
from rollcast_demo.rollout import Sample

GROUP_SIZE = 8
_CANDIDATES = 256
_VOCABULARY_SIZE = 150_000
_BLOCK_TOKENS = 4096
# How far the reference and the sampling engine are from the trained weights, in logits.
_REFERENCE_DRIFT, _ENGINE_NOISE = 0.1, 0.02


def demo_like(
    samples: int,
    *,
    prompt_tokens: int,
    response_tokens: int,
    distinct: int | None = None,
    layout: ParallelLayout | None = None,
) -> dict[str, Any]:
    """Returns the `rollout_data` that one rank holds.

    The demo's 7 float32 columns, token ids as int64 and masks as int32. Log-probabilities and entropies come out of
    float32 softmaxes, the engine's out of one on bf16 logits, so that their bits repeat as real ones do and no more.

    Args:
        samples: of the whole rollout; neighbours are answers to one prompt.
        prompt_tokens: of each.
        response_tokens: the longest response; lengths are spread from half of it on.
        distinct: so many different samples, repeated with memory of their own; default: all.
        layout: of the rank; default: one that has everything.
    """
    layout = layout or ParallelLayout()
    generator = torch.Generator().manual_seed(0)
    chooser = random.Random(0)  # noqa: S311  # data for a measurement
    made: list[tuple[Sample, Scores]] = []
    prompt: list[int] = []
    for index in range(min(samples, distinct or samples)):
        if index % GROUP_SIZE == 0:
            prompt = _token_ids(prompt_tokens, generator)
        length = chooser.randint(response_tokens // 2, response_tokens)
        engine, scores = _score(length, generator)
        sample = Sample(
            tokens=prompt + _token_ids(length, generator),
            response_length=length,
            log_probs=engine.tolist(),
            problem=index // GROUP_SIZE,
            rollout=index,
            truncated=length == response_tokens,
            removed=index % 64 == 63,
            reward=float(chooser.random() < 0.4),
        )
        made.append((sample, scores))
    whole = [made[index % len(made)] for index in range(samples)]
    place = Place(
        data_rank=layout.data_parallel_rank,
        data_size=layout.data_parallel_size,
        context_rank=layout.context_parallel_rank,
        context_size=layout.context_parallel_size,
        first_sample=0,
        first_rollout=0,
    )
    owned = shard_positions(samples, data_rank=place.data_rank, data_size=place.data_size)
    return build_records([sample for sample, _ in whole], [whole[index][1] for index in owned], place).rollout_data


def _token_ids(count: int, generator: torch.Generator) -> list[int]:
    """Draws by Zipf's law from a vocabulary in order of frequency, as tokenizers number theirs; no word repeats it."""
    weights = 1 / torch.arange(1, _VOCABULARY_SIZE + 1, dtype=torch.float64)
    return torch.multinomial(weights, count, replacement=True, generator=generator).tolist()


def _score(length: int, generator: torch.Generator) -> tuple[torch.Tensor, Scores]:
    """Returns the engine's log-probabilities and the trainer's values."""
    blocks = [_score_block(min(_BLOCK_TOKENS, length - at), generator) for at in range(0, length, _BLOCK_TOKENS)]
    engine, log_probs, reference, entropy = (torch.cat(column) for column in zip(*blocks, strict=True))
    return engine, Scores(log_probs=log_probs, ref_log_probs=reference, entropy=entropy)


def _score_block(length: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    shape = (length, _CANDIDATES)
    logits = 2 * torch.randn(shape, generator=generator)
    # As in a trained model: half of the tokens are nearly certain, few are open; a mean entropy of about 0.5 nats.
    logits[:, 0] += 6 + 16 * torch.rand(length, generator=generator)
    trained = torch.log_softmax(logits, -1)
    chosen = torch.multinomial(trained.exp(), 1, generator=generator)
    reference = logits + _REFERENCE_DRIFT * torch.randn(shape, generator=generator)
    engine = logits + _ENGINE_NOISE * torch.randn(shape, generator=generator)
    values = (torch.log_softmax(each, -1) for each in (engine.bfloat16().float(), logits, reference))
    engine_chosen, trained_chosen, reference_chosen = (each.gather(1, chosen).squeeze(1) for each in values)
    return engine_chosen, trained_chosen, reference_chosen, -(trained.exp() * trained).sum(-1)
