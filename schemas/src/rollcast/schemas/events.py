"""The events of the wire contract, one frozen dataclass for each Avro record."""

from dataclasses import dataclass
from typing import TypeAlias

TRAIN_STREAM = "train"
"""The stream of train dumps; others have a rank's own numbering of something else."""

SHARD_SLOT = -1
"""Slot number of the columns that belong to a whole shard, not to one sample."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands inside a list, tuple or map for the tensor in the column of the same name and this `leaf`."""

    leaf: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSlice:
    """Bytes of a tensor, from `offset` on.

    Attributes:
        dtype: torch's name without `torch.`, or `dtypes.PACKED_VALUE`.
        shape: of the whole tensor.
        total_bytes: size of the whole tensor.
        offset: where this slice begins in the whole; with codec `SPOOL`, in the data of the bundle's tensor file.
        slice_bytes: size of this slice once decoded.
        codec: `RAW`, `PLANES`, `DELTA_PLANES` (see `codec`), or `SPOOL` (no data here).
        data: the encoded bytes, little-endian elements.
        base: with `DELTA_PLANES`, the index of the slice, earlier in the same part, that the differences are from.
    """

    dtype: str
    shape: tuple[int, ...]
    total_bytes: int
    offset: int
    slice_bytes: int
    codec: str
    data: bytes | memoryview
    base: int | None = None

    def another(
        self, *, offset: int, slice_bytes: int, codec: str, data: bytes | memoryview, base: int | None = None
    ) -> "TensorSlice":
        """Returns another slice of the same tensor."""
        # Not by `replace`, which takes five times as long: each column of each sample needs several.
        return TensorSlice(
            dtype=self.dtype,
            shape=self.shape,
            total_bytes=self.total_bytes,
            offset=offset,
            slice_bytes=slice_bytes,
            codec=codec,
            data=data,
            base=base,
        )


Scalar: TypeAlias = None | bool | int | float | str | bytes
PlainValue: TypeAlias = "Scalar | TensorRef | list[PlainValue] | tuple[PlainValue, ...] | dict[PlainValue, PlainValue]"
"""What a column can hold besides a tensor."""


@dataclass(frozen=True, slots=True)
class Column:
    """A named value of a sample or shard.

    Attributes:
        name: key in `rollout_data`.
        leaf: 0 for the value itself, n > 0 for the tensor that `TensorRef(n)` in it stands for.
        value: a plain value, or a slice of a tensor.
    """

    name: str
    leaf: int
    value: "PlainValue | TensorSlice"


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplePart:
    """One Kafka record of one slot. Fields as in `avro/SamplePart.1.avsc`."""

    run_id: str
    attempt: int
    stream: str = TRAIN_STREAM
    rollout_id: int
    data_parallel_rank: int
    slot: int
    rollout_position: int | None
    sample_index: int | None
    part: int
    part_count: int
    columns: tuple[Column, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DpShard:
    """Closing event of one data-parallel shard. Fields as in `avro/DpShard.1.avsc`."""

    run_id: str
    attempt: int
    stream: str = TRAIN_STREAM
    rollout_id: int
    data_parallel_rank: int
    data_parallel_size: int
    rank: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    context_parallel_size: int
    context_parallel_layout: str
    sample_count: int
    slot_digests: tuple[bytes, ...]
    part_counts: tuple[int, ...]
    raw_bytes: int
    replaced_values: int
    dropped_reason: str | None
    published_at_ms: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DumpCompleted:
    """A dump stands under its final name. Fields as in `avro/DumpCompleted.1.avsc`."""

    run_id: str
    attempt: int
    stream: str = TRAIN_STREAM
    rollout_id: int
    path: str
    sha256: str
    file_bytes: int
    complete: bool
    shard_count: int
    sample_count: int
    part_count: int
    completed_at_ms: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricPoint:
    """One metric of one rollout. Fields as in `avro/MetricPoint.1.avsc`."""

    run_id: str
    attempt: int
    rollout_id: int
    name: str
    per_rollout_mean: float | None
    per_token_mean: float | None
    rollout_count: int
    token_count: int
    non_finite_count: int
    computed_at_ms: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLetter:
    """A record that could not be used. Fields as in `avro/DeadLetter.1.avsc`."""

    topic: str
    partition: int
    offset: int
    reason: str
    key: bytes | None
    value: bytes
    value_bytes: int
    seen_at_ms: int


Event: TypeAlias = SamplePart | DpShard | DumpCompleted | MetricPoint | DeadLetter
