"""The plan of a shard: each tensor of the bundle with its final place, computed alike by all peers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import xxhash

from rollcast.producer.context_parallel import ContextLayout, Span, span_tokens, spans_by_rank
from rollcast.producer.errors import RolloutDataError
from rollcast.producer.fields import CONTEXT_PARALLEL_FIELDS, check_lengths, check_one_tensor_per_sample
from rollcast.producer.parallel import ParallelLayout
from rollcast.schemas.codec import SPOOL
from rollcast.schemas.events import SHARD_SLOT, Column, TensorSlice
from rollcast.schemas.limits import DEFAULT_LIMITS
from rollcast.schemas.parts import MAX_DIMENSIONS, MAX_NAME_BYTES
from rollcast.schemas.shards import ShardContent, sample_count, split_shard
from rollcast.schemas.tensors import Replaced, announce, flatten, item_count, normalise

_ONE_PER_SAMPLE = ("tokens", "total_lengths", "loss_masks")

# Readers refuse a larger value; map entries count twice there, as key and value.
_MAX_ITEMS = DEFAULT_LIMITS.max_items // 2

_SpansByRank: TypeAlias = tuple[tuple[Span, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTensor:
    """One tensor of the bundle.

    Attributes:
        name: unique in the bundle.
        announced: dtype, shape and size of the whole tensor.
        offset: where its bytes begin in the data of the tensor file.
        source: what this rank holds of it.
        spans: by context-parallel rank, the rows that it holds, where the tensor is split; else None.
        owner: the context-parallel rank that copies it where it is not split.
    """

    name: str
    announced: TensorSlice
    offset: int
    source: torch.Tensor
    spans: "_SpansByRank | None"
    owner: int

    @property
    def _row_bytes(self) -> int:
        """Bytes of one response token, where the tensor is split."""
        tokens = self.announced.shape[0] if self.spans is not None else 0
        return self.announced.total_bytes // tokens if tokens else 0

    def unheld(self) -> Iterator[tuple[int, int]]:
        """Yields `(offset in the file's data, size)` of what no rank holds; it must read as zero."""
        row_bytes = self._row_bytes
        if not row_bytes:
            return
        tokens, reached = self.announced.shape[0], 0
        for low, high in [*sorted(span for held in self.spans or () for span in held), (tokens, tokens)]:
            if low > reached:
                yield self.offset + reached * row_bytes, (low - reached) * row_bytes
            reached = max(reached, high)

    def segments(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """Yields `(offset in the file's data, offset in the rank's own bytes, size)` of what `rank` copies."""
        if self.spans is None:
            if rank == self.owner and self.announced.total_bytes:
                yield self.offset, 0, self.announced.total_bytes
            return
        row_bytes, position = self._row_bytes, 0
        for low, high in self.spans[rank] if row_bytes else ():
            size = (high - low) * row_bytes
            yield self.offset + low * row_bytes, position, size
            position += size


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecords:
    """Everything of a shard that is not tensor bytes; holds no reference to the trainer's memory.

    Attributes:
        slots: the columns of each slot, the shard's own last; tensors refer to the file (codec `SPOOL`).
        positions: rollout position of each sample, or None.
        sample_indices: sample index of each sample, or None.
        replaced_values: values that a marker stands for.
    """

    slots: tuple[tuple[Column, ...], ...]
    positions: tuple[int | None, ...]
    sample_indices: tuple[int | None, ...]
    replaced_values: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlan:
    """What a bundle will hold.

    Attributes:
        tensors: in file order.
        data_bytes: size of all of them.
        records: the rest.
        digest: 63-bit hash of fields, dtypes, shapes and sample count; equal on all peers of a shard.
    """

    tensors: tuple[PlannedTensor, ...]
    data_bytes: int
    records: ShardRecords
    digest: int


def make_plan(
    rollout_data: Mapping[str, Any],
    layout: ParallelLayout,
    *,
    context_layout: ContextLayout = ContextLayout.ZIGZAG_THD,
    in_place: bool = True,
) -> ShardPlan:
    """Returns the plan of a shard from what this rank holds of it. Copies nothing, waits for nobody.

    Args:
        rollout_data: what this rank holds.
        layout: this rank's coordinates.
        context_layout: how context parallelism cuts a sequence.
        in_place: the peers share the file, so each copies some of the tensors that all of them hold.

    Raises:
        RolloutDataError: columns that are misaligned with the samples or with this rank's spans.
        TypeError: an entry of a split field is no tensor.
    """
    replaced = Replaced()
    data = {name: normalise(name, value, replaced) for name, value in rollout_data.items()}
    spans = _check_alignment(data, layout, context_layout)
    content = split_shard(data)
    builder = _Builder(spans, layout.context_parallel_size if in_place else 1, replaced)
    slots = tuple(
        builder.add_slot(slot, values) for slot, values in [*enumerate(content.slots), (SHARD_SLOT, content.own)]
    )
    return ShardPlan(
        tensors=tuple(builder.tensors),
        data_bytes=builder.data_bytes,
        records=ShardRecords(
            slots=slots,
            positions=tuple(content.positions),
            sample_indices=tuple(content.sample_indices),
            replaced_values=replaced.count,
        ),
        digest=_digest(content, builder.tensors, slots),
    )


def _check_alignment(
    data: Mapping[str, Any], layout: ParallelLayout, context_layout: ContextLayout
) -> list[_SpansByRank]:
    """Returns the spans of each slot, empty where nothing is split."""
    count = sample_count(data)
    for name in _ONE_PER_SAMPLE:
        value = data.get(name)
        if isinstance(value, (list, tuple)) and len(value) != count:
            raise RolloutDataError(
                f"{name!r} has {len(value)} entries for {count} samples (the length of 'response_lengths'); "
                "it needs one per sample"
            )
    split_fields = [name for name in CONTEXT_PARALLEL_FIELDS if data.get(name) is not None]
    if not split_fields:
        return []
    spans = _spans_of_slots(data, count, layout.context_parallel_size, context_layout)
    for name in split_fields:
        for slot, tensor in enumerate(check_one_tensor_per_sample(name, data[name], count)):
            held = span_tokens(spans[slot][layout.context_parallel_rank])
            if not tensor.dim() or len(tensor) != held:
                raise RolloutDataError(
                    f"{name!r} of sample {slot} has shape {tuple(tensor.shape)}; this rank (context-parallel "
                    f"{layout.context_parallel_rank} of {layout.context_parallel_size}) holds {held} of its "
                    f"{int(data['response_lengths'][slot])} response tokens"
                )
    return spans if layout.context_parallel_size > 1 else []


def _spans_of_slots(
    data: Mapping[str, Any], count: int, cp_size: int, context_layout: ContextLayout
) -> list[_SpansByRank]:
    responses = check_lengths(data, "response_lengths", count)
    if cp_size == 1 and data.get("total_lengths") is None:
        # Without context parallelism a rank holds the whole response, however long the prompt is.
        return [spans_by_rank(context_layout, 1, response, response) for response in responses]
    totals = check_lengths(data, "total_lengths", count)
    padded: list[int | None] = [None] * count
    if cp_size > 1 and context_layout is ContextLayout.ZIGZAG_BSHD:
        padded = [*check_lengths(data, "max_seq_lens", count)]
    return [spans_by_rank(context_layout, cp_size, *lengths) for lengths in zip(totals, responses, padded, strict=True)]


class _Builder:
    """Gives each tensor its place in the file, and one of the peers to copy it."""

    def __init__(self, spans: list[_SpansByRank], copying_ranks: int, replaced: Replaced) -> None:
        self._replaced = replaced
        self.tensors: list[PlannedTensor] = []
        self.data_bytes = 0
        self._spans = spans
        self._load = [0] * copying_ranks

    def add_slot(self, slot: int, values: Mapping[str, Any]) -> tuple[Column, ...]:
        columns = []
        for name, value in values.items():
            if len(name.encode()) > MAX_NAME_BYTES:
                raise RolloutDataError(
                    f"column name {name[:40]!r}... is longer than {MAX_NAME_BYTES} bytes; shorten it"
                )
            if item_count(value, _MAX_ITEMS) > _MAX_ITEMS:
                value = self._replaced.marker(name, value)
            for column, tensor in flatten(name, value):
                if tensor is None:
                    columns.append(column)
                elif tensor.dim() > MAX_DIMENSIONS:
                    raise RolloutDataError(f"{name!r} has {tensor.dim()} dimensions; at most {MAX_DIMENSIONS} travel")
                elif slot != SHARD_SLOT and self._spans and name in CONTEXT_PARALLEL_FIELDS:
                    whole = announce(tensor.dtype, (int(values["response_lengths"]), *tensor.shape[1:]))
                    columns.append(self._add_tensor(slot, column, tensor, whole, self._spans[slot]))
                elif isinstance(column.value, TensorSlice):
                    columns.append(self._add_tensor(slot, column, tensor, column.value, None))
        return tuple(columns)

    def _add_tensor(
        self, slot: int, column: Column, tensor: torch.Tensor, announced: TensorSlice, spans: _SpansByRank | None
    ) -> Column:
        owner = min(range(len(self._load)), key=self._load.__getitem__)
        if spans is None:
            self._load[owner] += announced.total_bytes
        self.tensors.append(
            PlannedTensor(
                name=f"{slot}.{column.leaf}.{column.name}",
                announced=announced,
                offset=self.data_bytes,
                source=tensor,
                spans=spans,
                owner=owner,
            )
        )
        # Not dataclasses.replace: there is one for each tensor, on the training thread, and this is twice as fast.
        in_spool = TensorSlice(
            dtype=announced.dtype,
            shape=announced.shape,
            total_bytes=announced.total_bytes,
            offset=self.data_bytes,
            slice_bytes=announced.total_bytes,
            codec=SPOOL,
            data=b"",
        )
        self.data_bytes += announced.total_bytes
        return Column(column.name, column.leaf, in_spool)


def _digest(content: ShardContent, tensors: list[PlannedTensor], slots: tuple[tuple[Column, ...], ...]) -> int:
    digest = xxhash.xxh3_64()
    digest.update(repr((len(content.slots), [[column.name for column in columns] for columns in slots])).encode())
    for tensor in tensors:
        digest.update(repr((tensor.name, tensor.announced.dtype, tensor.announced.shape, tensor.spans)).encode())
    # It travels as a signed 64-bit integer.
    return int(digest.intdigest()) >> 1
