"""Sums of per-token values over the samples of a micro-batch, such that the sums of all ranks add up."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from rollcast.producer.context_parallel import get_logits_and_tokens_offset_with_cp
from rollcast.producer.errors import RolloutDataError
from rollcast.producer.parallel import current_layout
from rollcast.schemas.sizes import counted

Reducer: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Per-token values of a micro-batch, as this rank holds them, to a scalar."""


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[torch.Tensor],
    sample_denoms: Sequence[float] | torch.Tensor | None = None,
    calculate_per_token_loss: bool = False,
    qkv_format: str = "thd",
    max_seq_lens: Sequence[int] | None = None,
) -> Reducer:
    """Returns the reducer of a micro-batch: `sum over samples of sum(x * mask) / max(denominator, 1)`.

    Its argument is one tensor of one dimension: the response tokens that this context-parallel rank holds of each
    sample, the samples one after the other. Added up over micro-batches and over data- and context-parallel ranks and
    divided by the number of rollouts, the results are the mean over rollouts. The reducer is differentiable; what a
    token under mask 0 holds, NaN included, reaches neither the sum nor the gradient.

    Args:
        total_lengths: prompt and response of each sample, in tokens.
        response_lengths: response of each sample, in tokens.
        loss_masks: mask of each whole response, not cut by context parallelism; any dtype.
        sample_denoms: denominator of each sample: the mask sum of the whole rollout that it belongs to, over all its
            samples of the step; default: the sample's own mask sum.
        calculate_per_token_loss: the plain masked sum, without denominators.
        qkv_format: `thd` or `bshd`; with `bshd` chunks are those of the padded length.
        max_seq_lens: padded length of each sample, needed for `bshd` with context parallelism.

    Raises:
        RolloutDataError: not one length, mask or denominator per sample, or a mask of another length than its
            response. The reducer raises it for a tensor that is not what this rank holds.
    """
    _check_columns(total_lengths, response_lengths, loss_masks, sample_denoms, max_seq_lens)
    layout = current_layout()
    padded_lengths: Sequence[int | None] = max_seq_lens or [None] * len(loss_masks)
    masks = [
        _held_part(
            mask, total, response, qkv_format, padded, layout.context_parallel_rank, layout.context_parallel_size
        )
        for total, response, mask, padded in zip(
            total_lengths, response_lengths, loss_masks, padded_lengths, strict=True
        )
    ]
    # From the whole masks: a denominator must not depend on how a response is cut.
    denominators = [
        torch.clamp_min(torch.as_tensor(denominator), 1)
        for denominator in (sample_denoms if sample_denoms is not None else [mask.sum() for mask in loss_masks])
    ]
    held_lengths = [len(mask) for mask in masks]
    # Multiplying by 0 would let NaN and infinity through.
    ignored = [mask == 0 for mask in masks]

    def reduce(x: torch.Tensor) -> torch.Tensor:
        if x.shape != (sum(held_lengths),):
            raise RolloutDataError(
                f"a tensor of shape {tuple(x.shape)} was given to the reducer of a micro-batch of which this rank "
                f"holds {sum(held_lengths)} response tokens; give one value per held token"
            )
        result = x[:0].sum()
        for values, mask, ignore, denominator in zip(
            torch.split(x, held_lengths), masks, ignored, denominators, strict=True
        ):
            masked_sum = (values.masked_fill(ignore, 0) * mask).sum()
            result = result + (masked_sum if calculate_per_token_loss else masked_sum / denominator)
        return result

    return reduce


def _check_columns(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[torch.Tensor],
    sample_denoms: Sequence[float] | torch.Tensor | None,
    max_seq_lens: Sequence[int] | None,
) -> None:
    columns = {
        "total_lengths": total_lengths,
        "loss_masks": loss_masks,
        "sample_denoms": sample_denoms,
        "max_seq_lens": max_seq_lens,
    }
    for name, column in columns.items():
        if column is not None and len(column) != len(response_lengths):
            raise RolloutDataError(
                f"{name!r} has {counted(len(column), 'entry', 'entries')} for "
                f"{counted(len(response_lengths), 'sample')}, as response_lengths says; give one per sample"
            )
    for index, (mask, response_length) in enumerate(zip(loss_masks, response_lengths, strict=True)):
        if mask.shape != (response_length,):
            raise RolloutDataError(
                f"the loss mask of sample {index} has shape {tuple(mask.shape)} for a response of {response_length} "
                "tokens; give the mask of the whole response"
            )


def _held_part(
    mask: torch.Tensor,
    total_length: int,
    response_length: int,
    qkv_format: str,
    max_seq_len: int | None,
    cp_rank: int,
    cp_size: int,
) -> torch.Tensor:
    if cp_size == 1:
        return mask
    _, _, _, (first, second) = get_logits_and_tokens_offset_with_cp(
        total_length, response_length, qkv_format, max_seq_len, cp_rank, cp_size
    )
    prompt = total_length - response_length
    return torch.cat([mask[low - prompt : high - prompt] if low < high else mask[:0] for low, high in (first, second)])
