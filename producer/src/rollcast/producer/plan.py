"""The plan of a shard: each tensor of the bundle with its final place, computed alike by all peers.

It is made on the training thread, for a thousand tensors and more: what need not be done there waits for `commit`.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from rollcast.producer.context_parallel import ContextLayout, Piece, pieces_of
from rollcast.producer.errors import RolloutDataError
from rollcast.producer.fields import CONTEXT_PARALLEL_FIELDS, check_lengths, check_one_tensor_per_sample
from rollcast.producer.parallel import ParallelLayout
from rollcast.schemas.events import SHARD_SLOT, PlainValue
from rollcast.schemas.limits import DEFAULT_LIMITS
from rollcast.schemas.parts import MAX_DIMENSIONS, MAX_NAME_BYTES
from rollcast.schemas.shards import is_per_sample, places, sample_count
from rollcast.schemas.tensors import Replaced, dtype_name, extract_tensors, item_count, normalise

# Not comprehensions: these are read of thousands of tensors, on the training thread.
_SHAPE, _DTYPE, _NBYTES = attrgetter("shape"), attrgetter("dtype"), attrgetter("nbytes")

_ONE_PER_SAMPLE = ("tokens", "total_lengths", "loss_masks")

# Readers refuse a larger value; map entries count twice there, as key and value.
_MAX_ITEMS = DEFAULT_LIMITS.max_items // 2

IntArray: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """Runs of bytes to copy, none empty. Arrays: as objects they would cost as much time as the bytes.

    Attributes:
        tensors: index of the tensor, in file order.
        targets: offset in the data of the tensor file.
        starts: offset in what the rank holds of the tensor.
        sizes: in bytes.
    """

    tensors: IntArray
    targets: IntArray
    starts: IntArray
    sizes: IntArray

    def as_tuples(self) -> Iterator[tuple[int, int, int, int]]:
        """Yields `(tensor, target, start, size)`."""
        arrays = (self.tensors, self.targets, self.starts, self.sizes)
        return zip(*(array.tolist() for array in arrays), strict=True)


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
        slots: slot of each tensor.
        leaves: leaf of each tensor.
        dtypes: dtype of each tensor.
        shapes: shape of each whole tensor.
        sizes: bytes of each whole tensor.
        offsets: where each begins in the data of the tensor file.
        owners: the context-parallel rank that copies each; None where they are split.
    """

    name: str
    plain: dict[int, PlainValue]
    slots: Sequence[int]
    leaves: Sequence[int]
    dtypes: Sequence[torch.dtype]
    shapes: Sequence[tuple[int, ...]]
    sizes: Sequence[int]
    offsets: Sequence[int]
    owners: Sequence[int] | None

    def tensors(self) -> Iterator[PlannedTensor]:
        """Yields the tensors in file order."""
        lists = (self.slots, self.leaves, self.dtypes, self.shapes, self.sizes, self.offsets)
        return (PlannedTensor(*values) for values in zip(*lists, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecords:
    """Everything of a shard that is not tensor bytes; holds no reference to the trainer's memory.

    Attributes:
        columns: in file order.
        pieces: by slot, the rows of its split tensors; empty where nothing is split.
        positions: rollout position of each sample, or None.
        sample_indices: sample index of each sample, or None.
        replaced_values: values that a marker stands for.
    """

    columns: tuple[PlannedColumn, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    positions: tuple[int | None, ...]
    sample_indices: tuple[int | None, ...]
    replaced_values: int

    def segments(self, rank: int | None) -> Segments:
        """Returns what a rank copies, in file order.

        Args:
            rank: context-parallel rank; None for what no rank holds, which must read as zero.
        """
        slot, low, held, rows = _rows_of(rank, self.pieces)
        found = [np.empty((4, 0), np.int64)]
        first = 0
        for column in self.columns:
            offsets, sizes = np.array(column.offsets, np.int64), np.array(column.sizes, np.int64)
            if column.owners is None:
                whole_rows = np.array([shape[0] for shape in column.shapes], np.int64)
                row_bytes = (sizes // np.maximum(whole_rows, 1))[slot]
                found.append(
                    np.stack([first + slot, offsets[slot] + low * row_bytes, held * row_bytes, rows * row_bytes])
                )
            else:
                own = np.flatnonzero(np.array(column.owners) == (-1 if rank is None else rank))
                found.append(np.stack([first + own, offsets[own], np.zeros_like(own), sizes[own]]))
            first += len(sizes)
        together = np.concatenate(found, axis=1)
        tensors, targets, starts, sizes = together[:, together[3] > 0]
        return Segments(tensors=tensors, targets=targets, starts=starts, sizes=sizes)


def _rows_of(rank: int | None, pieces: tuple[tuple[Piece, ...], ...]) -> IntArray:
    """Returns slot, first row in the whole, first row in what the rank holds, and number of rows."""
    found = []
    for slot, slot_pieces in enumerate(pieces):
        reached = held = 0
        for rows, holder in slot_pieces:
            if holder == rank:
                found.append((slot, reached, held, rows))
                held += rows
            reached += rows
    return np.array(found, np.int64).reshape(-1, 4).T


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
    pieces = _check_alignment(data, layout, context_layout)
    count = sample_count(data)
    builder = _Builder(count, pieces, layout.context_parallel_size if in_place else 1, replaced)
    for name, value in data.items():
        builder.add(name, value)
    return ShardPlan(
        records=ShardRecords(
            columns=tuple(builder.columns),
            pieces=pieces,
            positions=tuple(places(data, "partition", count)),
            sample_indices=tuple(places(data, "sample_indices", count)),
            replaced_values=replaced.count,
        ),
        sources=tuple(builder.sources),
        data_bytes=builder.data_bytes,
        digest=builder.digest(),
    )


def _check_alignment(
    data: Mapping[str, Any], layout: ParallelLayout, context_layout: ContextLayout
) -> tuple[tuple[Piece, ...], ...]:
    """Returns the pieces of each slot, none where nothing is split."""
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
        return ()
    pieces = _pieces_of_slots(data, count, layout.context_parallel_size, context_layout)
    own_rank = layout.context_parallel_rank
    held_by_slot = [sum([rows for rows, holder in slot if holder == own_rank]) for slot in pieces]
    for name in split_fields:
        tensors = check_one_tensor_per_sample(name, data[name], count)
        rows = [shape[0] if shape else -1 for shape in map(_SHAPE, tensors)]
        if rows != held_by_slot:
            slot = next(slot for slot in range(count) if rows[slot] != held_by_slot[slot])
            raise RolloutDataError(
                f"{name!r} of sample {slot} has shape {tuple(tensors[slot].shape)}; this rank (context-parallel "
                f"{layout.context_parallel_rank} of {layout.context_parallel_size}) holds {held_by_slot[slot]} of its "
                f"{int(data['response_lengths'][slot])} response tokens"
            )
    return pieces if layout.context_parallel_size > 1 else ()


def _pieces_of_slots(
    data: Mapping[str, Any], count: int, cp_size: int, context_layout: ContextLayout
) -> tuple[tuple[Piece, ...], ...]:
    responses = check_lengths(data, "response_lengths", count)
    if cp_size == 1 and data.get("total_lengths") is None:
        # Without context parallelism a rank holds the whole response, however long the prompt is.
        return tuple([pieces_of(context_layout, 1, response, response) for response in responses])
    totals = check_lengths(data, "total_lengths", count)
    padded: list[int | None] = [None] * count
    if cp_size > 1 and context_layout is ContextLayout.ZIGZAG_BSHD:
        padded = [*check_lengths(data, "max_seq_lens", count)]
    lengths = zip(totals, responses, padded, strict=True)
    return tuple([pieces_of(context_layout, cp_size, *slot) for slot in lengths])


class _Builder:
    """Gives each tensor its place in the file, and one of the peers to copy it."""

    def __init__(
        self, count: int, pieces: tuple[tuple[Piece, ...], ...], copying_ranks: int, replaced: Replaced
    ) -> None:
        self.columns: list[PlannedColumn] = []
        self.sources: list[torch.Tensor] = []
        self.data_bytes = 0
        self._count, self._pieces, self._copying_ranks = count, pieces, copying_ranks
        self._rows = [sum([rows for rows, _ in slot]) for slot in pieces]
        self._replaced = replaced
        self._digest = xxhash.xxh3_64(repr((count, pieces)).encode())

    def digest(self) -> int:
        # It travels as a signed 64-bit integer.
        return int(self._digest.intdigest()) >> 1

    def add(self, name: str, value: Any) -> None:
        if not isinstance(name, str):
            raise RolloutDataError(f"rollout_data has the key {name!r}; its keys are column names, strings")
        if len(name.encode()) > MAX_NAME_BYTES:
            raise RolloutDataError(f"column name {name[:40]!r}... is longer than {MAX_NAME_BYTES} bytes; shorten it")
        per_sample = is_per_sample(name, value, self._count)
        values = list(value) if per_sample else [value]
        slots = range(self._count) if per_sample else [SHARD_SLOT]
        if {*map(type, values)} <= {torch.Tensor}:
            self._add_column(name, {}, slots, [0] * len(slots), values)
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
    ) -> None:
        shapes: list[tuple[int, ...]] = [*map(_SHAPE, tensors)]
        if (dimensions := max(map(len, shapes), default=0)) > MAX_DIMENSIONS:
            raise RolloutDataError(f"{name!r} has {dimensions} dimensions; at most {MAX_DIMENSIONS} travel")
        dtypes: list[torch.dtype] = [*map(_DTYPE, tensors)]
        if self._pieces and name in CONTEXT_PARALLEL_FIELDS:
            # The whole, not what this rank holds of it.
            shapes = [(rows, *shape[1:]) for rows, shape in zip(self._rows, shapes, strict=True)]
            sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
            owners = None
        else:
            sizes = [*map(_NBYTES, tensors)]
            owners = self._owners(sizes)
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
                shapes=shapes,
                sizes=sizes,
                offsets=offsets,
                owners=owners,
            )
        )
        kinds = [dtype_name(dtype) for dtype in (dtypes if len({*dtypes}) > 1 else dtypes[:1])]
        described = (name, [*plain], [*slots], leaves, kinds)
        self._digest.update(repr(described).encode())
        self._digest.update(array("q", map(len, shapes)))
        self._digest.update(array("q", chain.from_iterable(shapes)))

    def _owners(self, sizes: list[int]) -> list[int]:
        """Returns who copies each tensor that all peers hold: about as many bytes each."""
        ranks, total = self._copying_ranks, sum(sizes)
        return [reached * ranks // total for reached in accumulate([0, *sizes[:-1]])] if total else [0] * len(sizes)
