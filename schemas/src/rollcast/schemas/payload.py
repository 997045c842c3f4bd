"""The v2 dump contract: DP shards to one payload, the content of a dump."""

import logging
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from rollcast.schemas.parts import content_digest, pack_large_values
from rollcast.schemas.shards import LAYOUT_FIELDS, POSITION_FIELDS, WHOLE_BATCH_FIELDS, as_list, split_shard
from rollcast.schemas.tensors import Replaced, columns_of, normalise

FORMAT_VERSION = 2

_log = logging.getLogger("rollcast.schemas")


def build_dump_payload(
    dp_shards: Sequence[Mapping[str, Any]],
    *,
    rollout_id: int,
    writer_rank: int,
    copy: bool = True,
    run_id: str | None = None,
) -> dict[str, Any]:
    """Returns the v2 payload of one rollout.

    Its keys: `format_version`, `rollout_id`, `rank`, `samples`, `dp_shards`, and `raw_reward` where a shard has it.
    A sample has `data_parallel_rank`, `sample_index`, `rollout_position` and each per-sample column. Samples are
    sorted by position if all have one, else by sample index if all have one, else they stay in order (one warning).
    The sort is stable. Every tensor is detached, on the CPU, and owns exactly its storage.

    Args:
        dp_shards: `{"rank": int, "data_parallel_rank": int, "rollout_data": dict}` each, in data-parallel order.
        rollout_id: number of the rollout.
        writer_rank: global rank of the process that would write the file.
        copy: whether the payload shares memory with nothing. If not, tensors on the CPU that fill their storage are
            taken as they are: for shards that nobody else uses, and in which no tensor stands twice.
        run_id: whose rollout it is, for the warnings. With it, the one of samples without an order has the attribute
            `once_for` (the run), by which a log filter can show it once: such a run has it in every rollout.

    Raises:
        RolloutDataError: a shard without `response_lengths`, or with misaligned positions.
    """
    whose = f"rollout {rollout_id}" if run_id is None else f"run {run_id!r} rollout {rollout_id}"
    replaced = Replaced()
    samples: list[dict[str, Any]] = []
    layouts: list[dict[str, Any]] = []
    for shard in dp_shards:
        data = {name: normalise(name, value, replaced) for name, value in shard["rollout_data"].items()}
        shard_samples, layout = _shard_entries(shard, data, copy)
        samples.extend(shard_samples)
        layouts.append(layout)
    payload: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "rollout_id": rollout_id,
        "rank": writer_rank,
        "samples": _ordered(samples, whose, run_id),
        "dp_shards": layouts,
    }
    for name in WHOLE_BATCH_FIELDS:
        found = [shard["rollout_data"][name] for shard in dp_shards if shard["rollout_data"].get(name) is not None]
        if found:
            payload[name] = _owned(normalise(name, found[0], replaced), copy)
            if any(_digest(value) != _digest(found[0]) for value in found[1:]):
                _log.warning("%s: the shards disagree on %s; the first shard's is kept", whose, name)
    return payload


def _shard_entries(
    shard: Mapping[str, Any], data: dict[str, Any], copy: bool
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rank = shard["data_parallel_rank"]
    content = split_shard(data)
    samples: list[dict[str, Any]] = [
        {
            "data_parallel_rank": rank,
            "sample_index": content.sample_indices[slot],
            "rollout_position": content.positions[slot],
            **{name: _owned(value, copy) for name, value in columns.items()},
        }
        for slot, columns in enumerate(content.slots)
    ]
    layout: dict[str, Any] = {"rank": shard["rank"], "data_parallel_rank": rank}
    layout |= dict.fromkeys(LAYOUT_FIELDS)
    for name, value in content.own.items():
        if name in POSITION_FIELDS:
            layout[name] = as_list(name, value)
        elif name not in WHOLE_BATCH_FIELDS:
            layout[name] = _owned(value, copy)
    return samples, layout


def _ordered(samples: list[dict[str, Any]], whose: str, run_id: str | None) -> list[dict[str, Any]]:
    for key in ("rollout_position", "sample_index"):
        if all(sample[key] is not None for sample in samples):
            return sorted(samples, key=itemgetter(key))
    _log.warning(
        "%s: not every sample has a rollout_position or a sample_index; they stay in data-parallel order; "
        "publish 'partition' or 'sample_indices' to order them",
        whose,
        extra={"once_for": run_id},
    )
    return samples


def _owned(value: Any, copy: bool) -> Any:
    """Returns a normalised value whose tensors are on the CPU and own exactly their storage."""
    if isinstance(value, torch.Tensor):
        if not copy and _fills_its_storage(value):
            return value
        return value.to("cpu", copy=True, memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: _owned(item, copy) for key, item in value.items()}
    if isinstance(value, list):
        return [_owned(item, copy) for item in value]
    if isinstance(value, tuple):
        return tuple(_owned(item, copy) for item in value)
    return value


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes


def _digest(value: object) -> bytes:
    return content_digest(pack_large_values(columns_of([("", normalise("", value, Replaced()))])))
