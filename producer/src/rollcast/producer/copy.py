"""Moves a planned shard into its tensor file: in place by every peer, or through messages to the writer."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch

from rollcast.producer.mover import can_join, join, move
from rollcast.producer.plan import PlannedColumn, ShardPlan
from rollcast.schemas.tensors import tensor_bytes

_Sent = tuple[int, int, int]
"""Offset in the file's data, offset in the stream of a peer's own bytes, size."""

_Join = tuple[tuple[torch.Tensor, ...], torch.dtype, torch.Tensor]
"""Tensors that lie side by side in the file, the dtype of each, and their place."""


def copy_own(plan: ShardPlan, rank: int, data: torch.Tensor) -> int:
    """Copies what this rank holds to its place; returns the number of bytes.

    Args:
        plan: the shard.
        rank: this rank's place among the context-parallel peers.
        data: the bytes of the tensor file, uint8.
    """
    joins: list[_Join] = []
    sources: list[torch.Tensor] = []
    others: list[PlannedColumn] = []
    first = 0
    # All columns before the first byte: what the plan has just read of the tensors is still in the processor's cache.
    for column in plan.records.columns:
        held = plan.sources[first : first + len(column.sizes)]
        first += len(held)
        if (own := _joins_of(column, rank, held, data)) is None:
            sources += held
            others.append(column)
        else:
            joins += own
    copied = 0
    for held, dtype, target in joins:
        join(held, dtype, target)
        copied += target.nbytes
    if sources:
        copies = plan.records.copies(rank, others)
        move(sources, copies, data)
        copied += int(copies.sizes.sum())
    return copied


def _joins_of(
    column: PlannedColumn, rank: int, held: tuple[torch.Tensor, ...], data: torch.Tensor
) -> list[_Join] | None:
    """Returns the calls that copy a rank's runs of a column; None where that is not possible."""
    if (dtype := column.flat_dtype) is None:
        return None
    joins = [(held[first:last], dtype, data[start:end]) for first, last, start, end in column.runs(rank)]
    return joins if all(can_join(*each) for each in joins) else None


def send_own(plan: ShardPlan, rank: int, send: Callable[[torch.Tensor], None], bucket_bytes: int) -> int:
    """Sends what this rank holds of the split tensors to the writer, in buckets; returns the number of bytes.

    A failure of this rank does not leave the writer waiting: every message is sent, and the last one tells.

    Raises:
        Exception: whatever the tensors provoked, after everything was sent.
    """
    sources = (plan.sources[tensor] for tensor, _, _ in plan.records.copies(rank).each())
    error: Exception | None = None
    sent = 0
    for bucket in _buckets(_stream_of(plan, rank), bucket_bytes):
        buffer = torch.zeros(sum(size for _, _, size in bucket), dtype=torch.uint8)
        position = 0
        for source, (_, _, size) in zip(islice(sources, len(bucket)), bucket, strict=True):
            try:
                buffer[position : position + size].copy_(tensor_bytes(source))
            except Exception as exc:  # noqa: BLE001  # whatever it is, the writer is waiting for this message
                error = exc
            position += size
        send(buffer)
        sent += position
    send(torch.tensor([error is None]))
    if error is not None:
        raise error
    return sent


def receive_from(
    plan: ShardPlan,
    rank: int,
    receive: Callable[[torch.Tensor], None],
    data: torch.Tensor,
    bucket_bytes: int,
) -> bool:
    """Receives what `send_own` of a context-parallel peer sends, and puts it in its place; tells if all is good."""
    for bucket in _buckets(_stream_of(plan, rank), bucket_bytes):
        start = bucket[0][1]
        buffer = torch.empty(sum(size for _, _, size in bucket), dtype=torch.uint8)
        receive(buffer)
        for target, position, size in bucket:
            data[target : target + size] = buffer[position - start : position - start + size]
    good = torch.empty(1, dtype=torch.bool)
    receive(good)
    return bool(good)


def _stream_of(plan: ShardPlan, rank: int) -> list[_Sent]:
    stream, position = [], 0
    for _, target, size in plan.records.copies(rank).each():
        stream.append((target, position, size))
        position += size
    return stream


def _buckets(sent: Sequence[_Sent], bucket_bytes: int) -> Iterator[list[_Sent]]:
    """Yields what is sent in groups of at most `bucket_bytes`, what is larger alone; alike on both sides."""
    bucket: list[_Sent] = []
    used = 0
    for each in sent:
        if bucket and used + each[2] > bucket_bytes:
            yield bucket
            bucket, used = [], 0
        bucket.append(each)
        used += each[2]
    if bucket:
        yield bucket
