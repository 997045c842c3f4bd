"""The plan of a shard: the place of each tensor in the bundle and who fills it, computed alike by all peers.

It is made on the training thread, for a thousand tensors and more: what need not be done there waits for `commit`.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from math import prod
from operator import attrgetter, mul
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from rollcast.producer.context_parallel import ContextLayout
from rollcast.producer.cuts import Cuts, IntArray
from rollcast.producer.errors import RolloutDataError
from rollcast.producer.fields import CONTEXT_PARALLEL_FIELDS, check_lengths, check_one_tensor_per_sample
from rollcast.producer.parallel import ParallelLayout
from rollcast.producer.rank_order import RankOrder, Run
from rollcast.schemas.events import SHARD_SLOT, PlainValue
from rollcast.schemas.limits import DEFAULT_LIMITS
from rollcast.schemas.parts import MAX_DIMENSIONS, MAX_NAME_BYTES
from rollcast.schemas.shards import is_per_sample, places, sample_count
from rollcast.schemas.sizes import counted
from rollcast.schemas.tensors import Replaced, are_scalars, dtype_name, extract_tensors, item_count, normalise

# Not comprehensions: these are read of thousands of tensors, on the training thread.
_SHAPE, _DTYPE, _DIMENSIONS = attrgetter("shape"), attrgetter("dtype"), attrgetter("ndim")
_ITEM_BYTES = attrgetter("itemsize")

_ONE_PER_SAMPLE = ("tokens", "total_lengths", "loss_masks")

# Readers refuse a larger value; map entries count twice there, as key and value.
_MAX_ITEMS = DEFAULT_LIMITS.max_items // 2


class Copies(NamedTuple):
    """What a rank copies, each tensor as the rank holds it. Arrays: objects would cost as much time as the bytes.

    Attributes:
        tensors: index of the tensor, in file order.
        targets: offset in the data of the tensor file.
        sizes: in bytes, none 0.
    """

    tensors: IntArray
    targets: IntArray
    sizes: IntArray

    def each(self) -> Iterator[tuple[int, int, int]]:
        """Yields `(tensor, target, size)`."""
        return zip(*(array.tolist() for array in self), strict=True)


class PlannedTensor(NamedTuple):
    """One tensor of the bundle.

    Attributes:
        slot: its slot.
        leaf: its place in the column, 0 for a value that is a tensor itself.
        dtype: of the elements.
        shape: of the whole tensor.
        size: bytes of the whole tensor.
        offset: where they begin in the data of the tensor file.
    """

    slot: int
    leaf: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    size: int
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedColumn:
    """One column of a shard; its tensors lie side by side in the file.

    Lists, not a list of objects: the training thread plans thousands of tensors, and makes nothing for each that can
    be made later.

    Attributes:
        name: of the column.
        plain: by slot, the values that are no tensors; a `TensorRef` in them stands for the tensor of that leaf.
        slots: slot of each tensor, in ascending order; a range, from 0, where each slot has one.
        leaves: leaf of each tensor.
        dtypes: dtype of each tensor.
        flat_dtype: dtype of all of them, where each has one dimension; None where they differ, or there are none.
        shapes: shape of each whole tensor.
        sizes: bytes of each whole tensor.
        offsets: where each begins in the data of the tensor file, right behind the one before.
        copied_by: the context-parallel rank that copies each, in ascending order; where each rank copies a part of
            every tensor, the order in which they put their parts until the bundle is committed.
    """

    name: str
    plain: dict[int, PlainValue]
    slots: Sequence[int]
    leaves: Sequence[int]
    dtypes: Sequence[torch.dtype]
    flat_dtype: torch.dtype | None
    shapes: Sequence[tuple[int, ...]]
    sizes: Sequence[int]
    offsets: Sequence[int]
    copied_by: list[int] | RankOrder

    def tensors(self) -> Iterator[PlannedTensor]:
        """Yields the tensors in file order."""
        return self._tensors(slice(None))

    def tensors_of(self, slot: int) -> Iterator[PlannedTensor]:
        """Yields those of one slot."""
        # Thousands of times while a rollout is committed; looking into a range takes several times as long.
        if isinstance(self.slots, range):
            return self._tensors(slice(max(slot, 0), slot + 1))
        return self._tensors(slice(bisect_left(self.slots, slot), bisect_right(self.slots, slot)))

    def runs(self, rank: int) -> list[Run]:
        """Returns what a rank copies."""
        if isinstance(self.copied_by, RankOrder):
            return self.copied_by.runs(rank, self.offsets[0])
        first, last = bisect_left(self.copied_by, rank), bisect_right(self.copied_by, rank)
        if first == last:
            return []
        return [Run(first, last, self.offsets[first], self.offsets[last - 1] + self.sizes[last - 1])]

    def _tensors(self, which: slice) -> Iterator[PlannedTensor]:
        lists = (self.slots, self.leaves, self.dtypes, self.shapes, self.sizes, self.offsets)
        return map(PlannedTensor, *(each[which] for each in lists))


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecords:
    """Everything of a shard that is not tensor bytes; holds no reference to the trainer's memory.

    Attributes:
        columns: in file order.
        positions: rollout position of each sample, or None.
        sample_indices: sample index of each sample, or None.
        replaced_values: values that a marker stands for.
    """

    columns: tuple[PlannedColumn, ...]
    positions: tuple[int | None, ...]
    sample_indices: tuple[int | None, ...]
    replaced_values: int

    def copies(self, rank: int, columns: Sequence[PlannedColumn] | None = None) -> Copies:
        """Returns what a rank copies; every peer can tell it of every other.

        Args:
            rank: context-parallel rank.
            columns: only those of these columns, whose tensors are counted from 0.
        """
        found, passed = [np.empty((3, 0), np.int64)], 0
        for column in self.columns if columns is None else columns:
            order = column.copied_by
            held = order.sizes[rank] if isinstance(order, RankOrder) else np.array(column.sizes, np.int64)
            for first, last, start, _ in column.runs(rank):
                sizes = held[first:last]
                found.append(np.stack([np.arange(first, last) + passed, start + np.cumsum(sizes) - sizes, sizes]))
            passed += len(column.sizes)
        together = np.concatenate(found, axis=1)
        return Copies(*together[:, together[2] > 0])


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlan:
    """What a bundle will hold.

    Attributes:
        records: what is not tensor bytes, and where those go.
        sources: what this rank holds of each tensor, in file order.
        data_bytes: size of all of them.
        digest: 63-bit hash of fields, dtypes, shapes and sample count; equal on all peers of a shard.
    """

    records: ShardRecords
    sources: tuple[torch.Tensor, ...]
    data_bytes: int
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
    count = sample_count(data)
    cuts = _cuts_of(data, count, layout.context_parallel_size, context_layout)
    copying_ranks = layout.context_parallel_size if in_place else 1
    builder = _Builder(count, cuts, layout.context_parallel_rank, copying_ranks, replaced)
    for name, value in data.items():
        builder.add(name, value)
    return ShardPlan(
        records=ShardRecords(
            columns=tuple(builder.columns),
            positions=tuple(places(data, "partition", count)),
            sample_indices=tuple(places(data, "sample_indices", count)),
            replaced_values=replaced.count,
        ),
        sources=tuple(builder.sources),
        data_bytes=builder.data_bytes,
        digest=builder.digest(),
    )


def _cuts_of(data: Mapping[str, Any], count: int, size: int, layout: ContextLayout) -> Cuts | None:
    """Returns how the responses are cut, None where no field depends on it."""
    for name in _ONE_PER_SAMPLE:
        value = data.get(name)
        if isinstance(value, (list, tuple)) and len(value) != count:
            raise RolloutDataError(
                f"{name!r} has {counted(len(value), 'entry', 'entries')} for {counted(count, 'sample')} (the length "
                "of 'response_lengths'); it needs one per sample"
            )
    if not any(_is_of_response(name, value) for name, value in data.items()):
        return None
    totals = responses = check_lengths(data, "response_lengths", count)
    # Without context parallelism a rank holds the whole response, however long the prompt is.
    if size > 1 or data.get("total_lengths") is not None:
        totals = check_lengths(data, "total_lengths", count)
    is_padded = size > 1 and layout is ContextLayout.ZIGZAG_BSHD
    padded = check_lengths(data, "max_seq_lens", count) if is_padded else totals
    lengths = (np.array(column, np.int64) for column in (totals, responses, padded))
    return Cuts(layout, size, *lengths)


def _is_of_response(name: str, value: object) -> bool:
    return name in CONTEXT_PARALLEL_FIELDS and value is not None


def _rows(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else -1


def _whole(rows: int, held: tuple[int, ...]) -> tuple[int, ...]:
    return rows, *held[1:]


class _Builder:
    """Gives each tensor its place in the file, and one of the peers to copy it."""

    def __init__(self, count: int, cuts: Cuts | None, rank: int, copying_ranks: int, replaced: Replaced) -> None:
        self.columns: list[PlannedColumn] = []
        self.sources: list[torch.Tensor] = []
        self.data_bytes = 0
        self._count, self._cuts, self._rank, self._copying_ranks = count, cuts, rank, copying_ranks
        self._replaced = replaced
        self._digest = xxhash.xxh3_64(repr(count).encode())
        if cuts is not None:
            self._rows: list[int] = cuts.responses.tolist()
            # One for all columns: the garbage collector of the trainer counts tuples.
            self._flat_shapes: list[tuple[int, ...]] = [*zip(self._rows)]
            self._rows_held: list[int] = cuts.held[rank].tolist()
            self._ordered_sizes: list[int] | None = None
            for lengths in (cuts.totals, cuts.responses, cuts.padded):
                self._digest.update(lengths.tobytes())

    def digest(self) -> int:
        # It travels as a signed 64-bit integer.
        return int(self._digest.intdigest()) >> 1

    def add(self, name: str, value: Any) -> None:
        if not isinstance(name, str):
            raise RolloutDataError(f"rollout_data has the key {name!r}; its keys are column names, strings")
        if len(name.encode()) > MAX_NAME_BYTES:
            raise RolloutDataError(f"column name {name[:40]!r}... is longer than {MAX_NAME_BYTES} bytes; shorten it")
        of_response = _is_of_response(name, value)
        per_sample = of_response or is_per_sample(name, value, self._count)
        values: list[Any] = [value]
        if of_response:
            values = check_one_tensor_per_sample(name, value, self._count)
        elif per_sample:
            values = list(value)
        slots = range(self._count) if per_sample else [SHARD_SLOT]
        if of_response or {*map(type, values)} <= {torch.Tensor}:
            self._add_column(name, {}, slots, [0] * len(slots), values, of_response=of_response)
            return
        if are_scalars(values):
            self._add_column(name, dict(zip(slots, values, strict=True)), [], [], [])
            return
        plain: dict[int, PlainValue] = {}
        places: list[tuple[int, int]] = []
        tensors: list[torch.Tensor] = []
        for slot, item in zip(slots, values, strict=True):
            if isinstance(item, torch.Tensor):
                places.append((slot, 0))
                tensors.append(item)
                continue
            if item_count(item, _MAX_ITEMS) > _MAX_ITEMS:
                item = self._replaced.marker(name, item)
            inner: list[torch.Tensor] = []
            plain[slot] = extract_tensors(item, inner)
            places += [(slot, leaf) for leaf in range(1, len(inner) + 1)]
            tensors += inner
        self._add_column(name, plain, [slot for slot, _ in places], [leaf for _, leaf in places], tensors)

    def _add_column(
        self,
        name: str,
        plain: dict[int, PlainValue],
        slots: Sequence[int],
        leaves: Sequence[int],
        tensors: list[torch.Tensor],
        *,
        of_response: bool = False,
    ) -> None:
        dimensions = [*map(_DIMENSIONS, tensors)]
        if max(dimensions, default=0) > MAX_DIMENSIONS:
            raise RolloutDataError(f"{name!r} has {max(dimensions)} dimensions; at most {MAX_DIMENSIONS} travel")
        dtypes: list[torch.dtype] = [*map(_DTYPE, tensors)]
        kinds = {*dtypes}
        # Of what is split, counts and shapes are those of the whole, not of what this rank holds.
        flat = bool(tensors) and dimensions.count(1) == len(tensors)
        if flat:
            # Nearly always: one value a token.
            counts: list[int] = [*map(torch.Tensor.numel, tensors)]
            is_split = of_response and self._is_split(name, counts, tensors)
            counts, shapes = (self._rows, self._flat_shapes) if of_response else (counts, [*zip(counts)])
        else:
            shapes = [*map(_SHAPE, tensors)]
            is_split = of_response and self._is_split(name, [*map(_rows, shapes)], tensors)
            shapes = [*map(_whole, self._rows, shapes)] if is_split else shapes
            counts = [*map(prod, shapes)]
        item_bytes = repeat(dtypes[0].itemsize) if len(kinds) == 1 else map(_ITEM_BYTES, dtypes)
        sizes = [*map(mul, counts, item_bytes)]
        offsets = [*accumulate(sizes, initial=self.data_bytes)]
        self.data_bytes = offsets.pop()
        self.sources += tensors
        self.columns.append(
            PlannedColumn(
                name=name,
                plain=plain,
                slots=slots,
                leaves=leaves,
                dtypes=dtypes,
                flat_dtype=dtypes[0] if flat and len(kinds) == 1 else None,
                shapes=shapes,
                sizes=sizes,
                offsets=offsets,
                copied_by=self._order_of(sizes) if is_split else self._owners(sizes),
            )
        )
        names = [dtype_name(dtype) for dtype in (dtypes if len(kinds) > 1 else dtypes[:1])]
        # A range is known by its length, and so are its leaves.
        places = () if isinstance(slots, range) else (slots, leaves)
        self._digest.update(repr((name, len(plain), len(slots), len(places), names, flat)).encode())
        for numbers in (plain, *places, *([counts] if flat else [dimensions, chain.from_iterable(shapes)])):
            self._digest.update(array("q", numbers))

    def _is_split(self, name: str, rows: list[int], tensors: list[torch.Tensor]) -> bool:
        """Checks what this rank holds of a response field; tells whether its peers hold the rest."""
        assert self._cuts is not None  # noqa: S101  # there is such a field
        if rows != self._rows_held:
            slot = next(slot for slot in range(self._count) if rows[slot] != self._rows_held[slot])
            raise RolloutDataError(
                f"{name!r} of sample {slot} has shape {tuple(tensors[slot].shape)}; this rank (context-parallel "
                f"{self._rank} of {self._cuts.size}) holds {self._rows_held[slot]} of its {self._rows[slot]} "
                f"response tokens, so the first dimension must be {self._rows_held[slot]}"
            )
        return self._cuts.size > 1 and bool(rows)

    def _order_of(self, sizes: list[int]) -> RankOrder:
        assert self._cuts is not None  # noqa: S101  # there is a split field
        # Most fields have a number of four bytes for each token.
        if sizes != self._ordered_sizes:
            self._ordered_sizes, self._order = sizes, RankOrder.of(self._cuts, sizes)
        return self._order

    def _owners(self, sizes: list[int]) -> list[int]:
        """Returns who copies each tensor that all peers hold: about as many bytes each."""
        ranks, total = self._copying_ranks, sum(sizes)
        if ranks == 1 or not total:
            return [0] * len(sizes)
        return [reached * ranks // total for reached in accumulate([0, *sizes[:-1]])]
