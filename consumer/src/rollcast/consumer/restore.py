"""An assembled rollout to the payload of its dump: join, verify, decode. CPU work, for a worker thread."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rollcast.consumer.brief import brief
from rollcast.consumer.rollout import Missing, Rollout, Shard, SlotCut, WholeSlot
from rollcast.consumer.streams import policy_loss_rank
from rollcast.schemas import DEFAULT_LIMITS, SHARD_SLOT, Limits, ShardContentError, build_dump_payload
from rollcast.schemas.joining import join, unpack_large_values
from rollcast.schemas.parts import content_digest
from rollcast.schemas.shards import LAYOUT_FIELDS, WHOLE_BATCH_FIELDS, join_shard
from rollcast.schemas.tensors import Replaced, normalise, unflatten

_NEVER_COLUMNS = (*LAYOUT_FIELDS, *WHOLE_BATCH_FIELDS)

UNKNOWN_RANK = -1
"""Stands for the writer's rank of a shard whose closing event never came."""


@dataclass(frozen=True, slots=True)
class BadSlot:
    """A slot whose content is not what its shard announced."""

    slot: WholeSlot
    problem: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """What became of a rollout.

    Attributes:
        payload: of the dump; None if it cannot be made.
        missing: what it lacks.
        bad_slots: slots that were refused. A complete rollout with one has no payload: the slot may come again.
        problem: why no payload can ever be made of these records; None otherwise.
    """

    payload: dict[str, Any] | None
    missing: Missing
    bad_slots: tuple[BadSlot, ...] = ()
    problem: str | None = None


def restore(rollout: Rollout, limits: Limits = DEFAULT_LIMITS) -> Restored:
    """Returns the payload of the rollout, from its whole and verified slots only."""
    values: dict[SlotCut, dict[str, Any]] = {}
    bad: list[BadSlot] = []
    for shard in rollout.shards:
        for slot in shard.slots:
            try:
                values[slot.cut] = _slot_values(shard, slot, limits)
            except Exception as exc:  # noqa: BLE001 - bytes from outside, whatever they provoke costs their slot alone
                bad.append(BadSlot(slot, f"{type(exc).__name__}: {exc}"))
    if bad and not rollout.missing:
        return Restored(payload=None, missing=rollout.missing, bad_slots=tuple(bad))
    missing = _with_bad_slots(rollout.missing, bad)
    try:
        payload = _payload(rollout, values, missing)
    except Exception as exc:  # noqa: BLE001 - as above: it costs the rollout, not the daemon
        problem = f"{type(exc).__name__}: {exc}"
        return Restored(payload=None, missing=missing, bad_slots=tuple(bad), problem=problem)
    return Restored(payload=payload, missing=missing, bad_slots=tuple(bad))


def _slot_values(shard: Shard, slot: WholeSlot, limits: Limits) -> dict[str, Any]:
    columns = join(slot.parts, limits)
    # Slot -1 has the last digest, which is also what the index -1 means.
    if shard.event is not None and content_digest(columns) != shard.event.slot_digests[slot.cut.slot]:
        raise ShardContentError(slot.cut.slot, "its content does not have the announced digest")
    return unflatten(unpack_large_values(columns, limits), copy=False)


def _with_bad_slots(missing: Missing, bad: Sequence[BadSlot]) -> Missing:
    slots = {rank: set(absent) for rank, absent in missing.slots}
    for entry in bad:
        slots.setdefault(entry.slot.cut.data_parallel_rank, set()).add(entry.slot.cut.slot)
    return replace(missing, slots=tuple((rank, tuple(sorted(absent))) for rank, absent in sorted(slots.items())))


def _payload(rollout: Rollout, values: Mapping[SlotCut, dict[str, Any]], missing: Missing) -> dict[str, Any]:
    rank = policy_loss_rank(rollout.id.stream)
    return _train_payload(rollout, values, missing) if rank is None else _call_payload(rollout, values, rank)


def _call_payload(rollout: Rollout, values: Mapping[SlotCut, dict[str, Any]], rank: int) -> dict[str, Any]:
    """Returns what one policy-loss call saw: its samples, and the call's own values beside them."""
    whole = [slot for shard in rollout.shards for slot in shard.slots if slot.cut in values]
    own = next((_normalised(values[slot.cut]) for slot in whole if slot.cut.slot == SHARD_SLOT), {})
    samples = [_normalised(values[slot.cut]) for slot in whole if slot.cut.slot != SHARD_SLOT]
    return {**own, "rank": rank, "call": rollout.id.rollout_id, "samples": samples}


def _normalised(values: Mapping[str, Any]) -> dict[str, Any]:
    # As `build_dump_payload` does: a hostile column may nest what torch.load(weights_only=True) refuses.
    replaced = Replaced()
    return {name: normalise(name, value, replaced) for name, value in values.items()}


def _train_payload(rollout: Rollout, values: Mapping[SlotCut, dict[str, Any]], missing: Missing) -> dict[str, Any]:
    incomplete_ranks = {*missing.shards, *(rank for rank, _ in missing.slots)}
    shards: list[dict[str, Any]] = []
    for shard in rollout.shards:
        whole = [slot for slot in shard.slots if slot.cut in values]
        rank = shard.data_parallel_rank
        make = _partial_rollout_data if rank in incomplete_ranks else _rollout_data
        shards.append(
            {
                "rank": shard.event.rank if shard.event is not None else UNKNOWN_RANK,
                "data_parallel_rank": rank,
                "rollout_data": make(whole, values),
            }
        )
    writer_rank = min((shard["rank"] for shard in shards if shard["rank"] != UNKNOWN_RANK), default=UNKNOWN_RANK)
    return build_dump_payload(
        shards,
        rollout_id=rollout.id.rollout_id,
        writer_rank=writer_rank,
        # The values are nobody else's, and no tensor stands in them twice.
        copy=False,
        run_id=brief(rollout.id.run_id),
    )


def _rollout_data(whole: Sequence[WholeSlot], values: Mapping[SlotCut, dict[str, Any]]) -> dict[str, Any]:
    samples = [values[slot.cut] for slot in whole if slot.cut.slot != SHARD_SLOT]
    own = next((values[slot.cut] for slot in whole if slot.cut.slot == SHARD_SLOT), {})
    return join_shard(samples, own)


def _partial_rollout_data(whole: Sequence[WholeSlot], values: Mapping[SlotCut, dict[str, Any]]) -> dict[str, Any]:
    """Returns `rollout_data` of the slots that are there; positions are theirs, not the shard's."""
    samples = [slot for slot in whole if slot.cut.slot != SHARD_SLOT]
    positions = {
        "partition": [slot.parts[0].rollout_position for slot in samples],
        "sample_indices": [slot.parts[0].sample_index for slot in samples],
    }
    known = {name: places for name, places in positions.items() if any(place is not None for place in places)}
    data = _rollout_data(whole, values)
    own = values[whole[0].cut] if whole and whole[0].cut.slot == SHARD_SLOT else {}
    for name, value in own.items():
        # With fewer samples, a value of the shard can have as many entries as there are samples, and would pass for a
        # column of theirs.
        looks_like_column = isinstance(value, (list, tuple, torch.Tensor)) and _length(value) == len(samples)
        if name in positions or (looks_like_column and name not in _NEVER_COLUMNS):
            del data[name]
    return {**data, **known}


def _length(value: Sequence[object] | torch.Tensor) -> int | None:
    return None if isinstance(value, torch.Tensor) and value.dim() == 0 else len(value)
