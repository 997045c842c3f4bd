"""Which response tokens a context-parallel rank holds, and how the whole response is put together.

Zigzag cuts a sequence into `2 * cp_size` chunks and gives rank r chunks r and `2 * cp_size - 1 - r`, so that causal
attention costs every rank the same; contiguous gives rank r the r-th of `cp_size` chunks. The record of response token
i belongs to the logit that predicts it, at sequence position `prompt_length - 1 + i`.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from rollcast.producer.errors import RolloutDataError
from rollcast.producer.parallel import current_layout
from rollcast.schemas.sizes import counted
from rollcast.schemas.tensors import tensor_bytes

Span: TypeAlias = tuple[int, int]
"""Half-open range of response tokens."""

Piece: TypeAlias = tuple[int, int | None]
"""Response tokens that follow each other, and the context-parallel rank that holds them; None: no rank does."""


class ContextLayout(StrEnum):
    """How context parallelism cuts a sequence."""

    ZIGZAG_THD = "zigzag-thd"
    """Two chunks a rank, sized by each sequence's own length (packed sequences)."""
    ZIGZAG_BSHD = "zigzag-bshd"
    """Two chunks a rank, sized by the padded length in the column `max_seq_lens`."""
    CONTIGUOUS = "contiguous"
    """One chunk a rank, sized by each sequence's own length."""


GatherTensor: TypeAlias = Callable[[torch.Tensor, int, int], torch.Tensor]
"""`(local, total_length, response_length)` to the whole response."""


def get_logits_and_tokens_offset_with_cp(
    total_length: int,
    response_length: int,
    qkv_format: str = "thd",
    max_seq_len: int | None = None,
    cp_rank: int | None = None,
    cp_size: int | None = None,
) -> tuple[int, tuple[Span, Span], tuple[Span, Span], tuple[Span, Span]]:
    """Returns `(chunk_size, chunks, logits_offsets, tokens_offsets)` of a rank's two zigzag chunks.

    All ranges are half-open sequence positions; an empty one is `(0, 0)`. The chunk size is
    `ceil(total_length / (2 * cp_size))`, for `bshd` that of `max_seq_len`.

    Args:
        total_length: prompt and response, in tokens.
        response_length: response, in tokens.
        qkv_format: `thd` (packed) or `bshd` (padded to `max_seq_len`).
        max_seq_len: padded length, needed for `bshd`.
        cp_rank: default: this process's.
        cp_size: default: this process's.

    Raises:
        RolloutDataError: lengths that contradict each other, an unknown format, or no context parallelism.
    """
    if cp_rank is None or cp_size is None:
        layout = current_layout()
        cp_rank = layout.context_parallel_rank if cp_rank is None else cp_rank
        cp_size = layout.context_parallel_size if cp_size is None else cp_size
    if cp_size < 2:
        raise RolloutDataError(f"cp_size is {cp_size}: offsets exist only where context parallelism splits a sequence")
    _check_response(total_length, response_length)
    if qkv_format == "thd":
        padded = total_length
    elif qkv_format == "bshd" and max_seq_len is not None:
        padded = max_seq_len
    else:
        raise RolloutDataError(
            f"qkv_format is {qkv_format!r} with max_seq_len {max_seq_len}; use thd, or bshd with one"
        )
    chunk_size = -(-padded // (2 * cp_size))
    prompt = total_length - response_length
    mirrored = 2 * cp_size - 1 - cp_rank
    chunks = (
        (cp_rank * chunk_size, (cp_rank + 1) * chunk_size),
        (mirrored * chunk_size, (mirrored + 1) * chunk_size),
    )
    logits = tuple(_clip(low, high, prompt - 1, total_length - 1) for low, high in chunks)
    tokens = tuple((low + 1, high + 1) if low < high else (0, 0) for low, high in logits)
    return chunk_size, chunks, (logits[0], logits[1]), (tokens[0], tokens[1])


def _check_response(total_length: int, response_length: int) -> None:
    if not 0 <= response_length <= total_length:
        raise RolloutDataError(f"response_length {response_length} is not within total_length {total_length}")


def _clip(low: int, high: int, floor: int, ceiling: int) -> Span:
    low, high = max(low, floor, 0), min(high, ceiling)
    return (low, high) if low < high else (0, 0)


def pieces_of(
    layout: ContextLayout,
    cp_size: int,
    total_length: int,
    response_length: int,
    max_seq_len: int | None = None,
) -> tuple[Piece, ...]:
    """Returns who holds a response, in order of its tokens; a single rank holds all of it.

    Every token is held once; but where there is no prompt, no rank holds the first, for which there is no logit. It
    is zero in whatever is restored.

    Args:
        layout: how the sequence is cut.
        cp_size: number of ranks.
        total_length: prompt and response, in tokens.
        response_length: response, in tokens.
        max_seq_len: padded length, for `ZIGZAG_BSHD`.

    Raises:
        RolloutDataError: lengths that contradict each other.
    """
    _check_response(total_length, response_length)
    if cp_size == 1:
        return ((response_length, 0),)
    chunks = cp_size if layout is ContextLayout.CONTIGUOUS else 2 * cp_size
    padded = max_seq_len if layout is ContextLayout.ZIGZAG_BSHD else total_length
    if padded is None or padded < total_length:
        raise RolloutDataError(f"{layout} needs a max_seq_len of at least total_length {total_length}, not {padded}")
    chunk_size = -(-padded // chunks)
    end, reached = total_length - 1, total_length - 1 - response_length
    pieces: list[Piece] = []
    if reached < 0 < response_length:
        pieces.append((1, None))
        reached = 0
    holder, held = -1, 0
    while reached < end:
        chunk = reached // chunk_size
        rank = chunk if chunk < cp_size else chunks - 1 - chunk
        if rank != holder:
            if held:
                pieces.append((held, holder))
            holder, held = rank, 0
        upto = min((chunk + 1) * chunk_size, end)
        held += upto - reached
        reached = upto
    if held:
        pieces.append((held, holder))
    return tuple(pieces)


def response_spans(total_length: int, response_length: int, cp_rank: int, cp_size: int) -> list[Span]:
    """Returns the response tokens that a rank's local tensor holds under `ZIGZAG_THD`, in the order it holds them."""
    return spans_of(cp_rank, pieces_of(ContextLayout.ZIGZAG_THD, cp_size, total_length, response_length))


def spans_of(cp_rank: int, pieces: Sequence[Piece]) -> list[Span]:
    """Returns the response tokens that a rank holds, in the order it holds them."""
    spans, reached = [], 0
    for tokens, holder in pieces:
        if holder == cp_rank:
            spans.append((reached, reached + tokens))
        reached += tokens
    return spans


def span_tokens(spans: Sequence[Span]) -> int:
    """Returns the number of tokens in the spans."""
    return sum(high - low for low, high in spans)


def all_gather_with_cp(tensor: torch.Tensor, total_length: int, response_length: int) -> torch.Tensor:
    """Returns the whole response of a zigzag-split tensor, on every context-parallel rank; bit-exact, any dtype.

    Collective over the context-parallel group; with one rank, the tensor itself.

    Args:
        tensor: this rank's spans, first dimension along the tokens.
        total_length: prompt and response, in tokens.
        response_length: response, in tokens.

    Raises:
        RolloutDataError: the tensor does not have this rank's number of tokens.
    """
    layout = current_layout()
    if layout.context_parallel_size == 1:
        return tensor
    from megatron.core import parallel_state

    size = layout.context_parallel_size
    pieces = pieces_of(ContextLayout.ZIGZAG_THD, size, total_length, response_length)
    spans = [spans_of(rank, pieces) for rank in range(size)]
    held = span_tokens(spans[layout.context_parallel_rank])
    if len(tensor) != held:
        raise RolloutDataError(
            f"this rank's tensor has {counted(len(tensor), 'token')}; it holds {held} of a response of "
            f"{response_length}"
        )
    # Zeros: without a prompt no logit predicts the first response token, and no rank holds it.
    whole = tensor.new_zeros((response_length, *tensor.shape[1:]))
    row_bytes = whole[:1].numel() * tensor.element_size() if response_length else 0
    longest = max(span_tokens(rank_spans) for rank_spans in spans) * row_bytes
    if not longest:
        return whole
    # Bytes, not values: every dtype is exact, and one too new for the backend's collectives still travels.
    send = torch.zeros(longest, dtype=torch.uint8, device=tensor.device)
    send[: tensor.numel() * tensor.element_size()] = tensor_bytes(tensor)
    received = [torch.empty_like(send) for _ in range(size)]
    group: Any = parallel_state.get_context_parallel_group()
    dist.all_gather(received, send, group=group)
    flat = tensor_bytes(whole)
    for rank_spans, rank_bytes in zip(spans, received, strict=True):
        position = 0
        for low, high in rank_spans:
            flat[low * row_bytes : high * row_bytes] = rank_bytes[position : position + (high - low) * row_bytes]
            position += (high - low) * row_bytes
    return whole
