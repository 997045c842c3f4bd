"""What the files of a dump hold, so that the framework's own tools read them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollcast.consumer.config import Layout
from rollcast.consumer.errors import LayoutError
from rollcast.consumer.rollout import Rollout
from rollcast.schemas import TRAIN_STREAM
from rollcast.schemas.shards import LAYOUT_FIELDS, WHOLE_BATCH_FIELDS

_PADDED = "zigzag-bshd"
_IDENTITY = ("data_parallel_rank", "sample_index", "rollout_position")
_ORDERS = (("rollout_position", "partition"), ("sample_index", "sample_indices"))
_LENGTHS = "response_lengths"


@dataclass(frozen=True, slots=True)
class DumpFile:
    """One file of a dump.

    Attributes:
        rank: what `{rank}` in the path template stands for; below zero, if the writer's rank is unknown.
        content: what is saved.
    """

    rank: int
    content: Mapping[str, Any]


def files_of(layout: Layout, payload: Mapping[str, Any], rollout: Rollout) -> tuple[DumpFile, ...]:
    """Returns the files of a rollout: the v2 payload, or with the layout of miles one for each shard of a train dump.

    Raises:
        LayoutError: two shards claim one rank, or the payload's samples cannot be told apart.
    """
    if layout is Layout.SLIME or rollout.id.stream != TRAIN_STREAM:
        return (DumpFile(payload["rank"], payload),)
    formats = {
        shard.data_parallel_rank: "bshd" if shard.event.context_parallel_layout == _PADDED else "thd"
        for shard in rollout.shards
        if shard.event is not None
    }
    own = {name: payload[name] for name in WHOLE_BATCH_FIELDS if name in payload}
    by_rank = _by_shard(payload)
    order = next((names for names in _ORDERS if all(each[names[0]] is not None for each in payload["samples"])), None)
    files = []
    for shard in payload["dp_shards"]:
        data_parallel_rank = shard["data_parallel_rank"]
        content = {
            "rollout_id": payload["rollout_id"],
            "rank": shard["rank"],
            "rollout_data": {**_rollout_data(shard, by_rank.get(data_parallel_rank, []), order), **own},
            "cp_rank": 0,
            "cp_size": 1,
            "qkv_format": formats.get(data_parallel_rank, "thd"),
        }
        known = data_parallel_rank in formats
        files.append(DumpFile(shard["rank"] if known else -1 - data_parallel_rank, content))
    if len({file.rank for file in files}) < len(files):
        raise LayoutError(f"{rollout.id}: shards share a rank ({[file.rank for file in files]}), and so a file name")
    return tuple(files)


def _by_shard(payload: Mapping[str, Any]) -> dict[int, list[Mapping[str, Any]]]:
    shards: dict[int, list[Mapping[str, Any]]] = {shard["data_parallel_rank"]: [] for shard in payload["dp_shards"]}
    for sample in payload["samples"]:
        rank = sample["data_parallel_rank"]
        if type(rank) is not int or rank not in shards:
            raise LayoutError(f"a column is named data_parallel_rank and hides it: {type(rank).__name__}; rename it")
        shards[rank].append(sample)
    return shards


def _rollout_data(
    shard: Mapping[str, Any], samples: list[Mapping[str, Any]], order: tuple[str, str] | None
) -> dict[str, Any]:
    """Returns `rollout_data` again: inverse of what `build_dump_payload` does with one shard."""
    if order is not None:
        samples = _by_slot(samples, *order, shard)
    names = [name for name in samples[0] if name not in _IDENTITY] if samples else [_LENGTHS]
    own = {
        name: value
        for name, value in shard.items()
        if name not in ("rank", "data_parallel_rank") and not (name in LAYOUT_FIELDS and value is None)
    }
    return {**{name: [sample[name] for sample in samples] for name in names}, **own}


def _by_slot(
    samples: list[Mapping[str, Any]], key: str, places_field: str, shard: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """Returns the samples of a shard by slot; they came in the order of `key`, which is stable among equal places."""
    places = shard[places_field] or []
    slots = sorted(range(len(places)), key=places.__getitem__)
    found = [sample[key] if type(sample[key]) is int else None for sample in samples]
    if found != [places[slot] for slot in slots]:
        raise LayoutError(f"a column is named {key} or data_parallel_rank and hides it; rename it")
    by_slot = dict(zip(slots, samples, strict=True))
    return [by_slot[slot] for slot in range(len(places))]
