"""`rollout_data` of one shard to what travels: one set of values for each slot, and the shard's own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rollcast.schemas.errors import RolloutDataError, ShardContentError
from rollcast.schemas.sizes import counted

POSITION_FIELDS = ("sample_indices", "partition")
"""Fields that place each sample: its index in the run, and its position in the rollout."""

LAYOUT_FIELDS = (*POSITION_FIELDS, "micro_batch_indices", "num_microbatches", "global_batch_sizes")
"""Fields of `rollout_data` that describe the shard, whatever their length."""

WHOLE_BATCH_FIELDS = ("raw_reward",)
"""Fields that hold the whole rollout on every shard."""

_LENGTHS = "response_lengths"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardContent:
    """Normalised `rollout_data`, divided.

    Attributes:
        slots: per-sample values by column name, one mapping for each sample.
        own: the other fields.
        positions: rollout position of each sample, or None.
        sample_indices: sample index of each sample, or None.
    """

    slots: list[dict[str, Any]]
    own: dict[str, Any]
    positions: list[int | None]
    sample_indices: list[int | None]


def sample_count(rollout_data: Mapping[str, Any]) -> int:
    """Returns the number of samples of a shard: the length of its `response_lengths`.

    Raises:
        RolloutDataError: there is none.
    """
    lengths = rollout_data.get(_LENGTHS)
    is_column = lengths.dim() > 0 if isinstance(lengths, torch.Tensor) else isinstance(lengths, (list, tuple))
    if lengths is None or not is_column:
        raise RolloutDataError(
            f"rollout_data has no {_LENGTHS!r} column (a list, tuple or tensor with one entry per sample); "
            "add it, its length is the number of samples"
        )
    return len(lengths)


def split_shard(data: Mapping[str, Any]) -> ShardContent:
    """Divides normalised `rollout_data`: a list, tuple or tensor with one entry per sample goes to the slots.

    Raises:
        RolloutDataError: no `response_lengths`, misaligned positions, or a name that is no string.
    """
    count = sample_count(data)
    slots: list[dict[str, Any]] = [{} for _ in range(count)]
    own: dict[str, Any] = {}
    for name, value in data.items():
        if not isinstance(name, str):
            raise RolloutDataError(f"rollout_data has the key {name!r}; its keys are column names, strings")
        if is_per_sample(name, value, count):
            for slot, item in zip(slots, value, strict=True):
                slot[name] = item
        else:
            own[name] = value
    return ShardContent(
        slots=slots,
        own=own,
        positions=places(data, "partition", count),
        sample_indices=places(data, "sample_indices", count),
    )


def join_shard(slots: Sequence[Mapping[str, Any]], own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `rollout_data` again; inverse of `split_shard` but for the kind of column (each becomes a list).

    Raises:
        ShardContentError: the slots do not have the same columns.
    """
    names = list(slots[0]) if slots else [_LENGTHS]
    for slot, values in enumerate(slots):
        if values.keys() != slots[0].keys():
            different = sorted(values.keys() ^ slots[0].keys())
            raise ShardContentError(slot, f"columns {different} are not in every sample of the shard")
    return {**{name: [values[name] for values in slots] for name in names}, **own}


def as_list(name: str, value: Any) -> list[int | None] | None:
    """Returns a position field as a list of Python integers, None where it is absent.

    Raises:
        RolloutDataError: it holds something else.
    """
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise RolloutDataError(f"{name!r} is a {type(value).__name__}; it needs a list with one integer per sample")
    items: list[Any] = [item.item() if isinstance(item, torch.Tensor) and item.numel() == 1 else item for item in value]
    for item in items:
        if item is not None and (isinstance(item, bool) or not isinstance(item, int)):
            raise RolloutDataError(f"{name!r} holds {item!r}; its entries are integers or None")
    return items


def is_per_sample(name: str, value: object, count: int) -> bool:
    """Returns whether a normalised field is a column, with one entry for each of `count` samples."""
    if name in LAYOUT_FIELDS or name in WHOLE_BATCH_FIELDS:
        return False
    if isinstance(value, torch.Tensor):
        return value.dim() > 0 and len(value) == count
    return isinstance(value, (list, tuple)) and len(value) == count


def places(data: Mapping[str, Any], name: str, count: int) -> list[int | None]:
    """Returns a position field with one entry per sample, None where nothing is known.

    Raises:
        RolloutDataError: another number of entries, or something else than integers.
    """
    values = as_list(name, data.get(name))
    if values is None:
        return [None] * count
    if len(values) != count:
        raise RolloutDataError(
            f"{name!r} has {counted(len(values), 'entry', 'entries')} for {counted(count, 'sample')}; "
            "it needs one per sample, or None"
        )
    return values
