"""Parts with one identity and different content: the announced digest tells which are the right ones."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rollcast.consumer.rollout import Place, Rollout, Shard, WholeSlot
from rollcast.schemas import Column, Limits, SamplePart, TensorSlice
from rollcast.schemas.framing import encode_column
from rollcast.schemas.joining import PlacedSlice, decode_slice_into, join
from rollcast.schemas.parts import content_digest

if TYPE_CHECKING:
    from rollcast.consumer.scratch import Scratch


def same_content(one: SamplePart, other: SamplePart) -> bool:
    """Returns whether two parts of one identity and cut say the same.

    A tensor that is placed and one that is not cannot be compared; they count as the same.
    """
    return (
        (one.rollout_position, one.sample_index) == (other.rollout_position, other.sample_index)
        and len(one.columns) == len(other.columns)
        and all(map(_same, one.columns, other.columns))
    )


def _same(one: Column, other: Column) -> bool:
    if (one.name, one.leaf) != (other.name, other.leaf):
        return False
    left, right = one.value, other.value
    if isinstance(left, PlacedSlice) and isinstance(right, PlacedSlice):
        if _header(left) != _header(right):
            return False
        return np.array_equal(np.frombuffer(left.data, np.uint8), np.frombuffer(right.data, np.uint8))
    if isinstance(left, TensorSlice) and isinstance(right, TensorSlice) and type(left) is not type(right):
        return True
    return encode_column(one) == encode_column(other)


def _header(piece: TensorSlice) -> tuple[object, ...]:
    return piece.dtype, piece.shape, piece.total_bytes, piece.offset, piece.slice_bytes


def place_beside(scratch: "Scratch", part: SamplePart, rivals: Sequence[SamplePart]) -> SamplePart:
    """Returns the part with its tensors in the scratch, apart from those of its rivals; as it is, if it repeats one.

    So a repeat takes no room in the scratch, and what says something else waits for room like any part. CPU work.

    Raises:
        ContractError: a slice is corrupt, or announces what cannot be or what is too large.
        ScratchFullError: there is no room now.
        OSError: the disk is full, or cannot be used.
    """
    if any(_repeats(held, part) for held in rivals):
        return part
    return scratch.place(part, apart=bool(rivals))


def _repeats(held: SamplePart, part: SamplePart) -> bool:
    """Returns whether a part, as it came, says what a held one says; decodes its slices, of bounded size, in memory."""
    if not same_content(held, part):
        return False
    decoded: list[npt.NDArray[np.uint8] | None] = []
    for one, other in zip(held.columns, part.columns, strict=True):
        left, right = one.value, other.value
        if not (isinstance(left, PlacedSlice) and isinstance(right, TensorSlice)):
            decoded.append(None)
            continue
        # The size and type of what is placed are ones that can be.
        if _header(left) != _header(right):
            return False
        content = np.empty(right.slice_bytes, np.uint8)
        decode_slice_into(content, right, decoded)
        if not np.array_equal(np.frombuffer(left.data, np.uint8), content):
            return False
        decoded.append(content)
    return True


def settle(rollout: Rollout, limits: Limits) -> tuple[Rollout, list[tuple[SamplePart, Place]]]:
    """Returns the rollout with the right parts in each slot for which several came, and the wrong parts.

    A slot of which no parts are right, or whose digest was not announced, is left as it is. CPU work.
    """
    wrong: list[tuple[SamplePart, Place]] = []
    shards = tuple(_settled(shard, limits, wrong) for shard in rollout.shards)
    return replace(rollout, shards=shards), wrong


def _settled(shard: Shard, limits: Limits, wrong: list[tuple[SamplePart, Place]]) -> Shard:
    if shard.event is None or not any(slot.rivals for slot in shard.slots):
        return shard
    slots = []
    for slot in shard.slots:
        right = slot
        if slot.rivals:
            digest = shard.event.slot_digests[slot.cut.slot]
            right = next((each for each in (slot, *slot.rivals) if _has_digest(each, digest, limits)), slot)
        if right is not slot:
            used = set(right.places)
            wrong += [(part, place) for part, place in parts_of(slot) if place not in used]
        slots.append(right)
    return replace(shard, slots=tuple(slots))


def _has_digest(slot: WholeSlot, digest: bytes, limits: Limits) -> bool:
    try:
        return content_digest(join(slot.parts, limits)) == digest
    except Exception:  # noqa: BLE001 - bytes from outside, whatever they provoke, they are not the right ones
        return False


def parts_of(slot: WholeSlot) -> list[tuple[SamplePart, Place]]:
    """Returns the parts of the slot and of its rivals, each once."""
    found: dict[Place, SamplePart] = {}
    for each in (slot, *slot.rivals):
        found |= zip(each.places, each.parts, strict=True)
    return [(part, place) for place, part in found.items()]
