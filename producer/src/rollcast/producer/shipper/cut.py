"""A bundle to the parts that Kafka gets, slot by slot."""

from collections.abc import Iterator
from dataclasses import dataclass

from rollcast.producer.spool.read import Bundle
from rollcast.schemas.events import SamplePart
from rollcast.schemas.framing import encode
from rollcast.schemas.parts import SlotId, content_digest, pack_large_values, split


@dataclass(frozen=True, slots=True)
class CutSlot:
    """One slot, ready to send.

    Attributes:
        digest: of its content.
        frames: its parts, encoded.
    """

    digest: bytes
    frames: list[bytes]


def cut(bundle: Bundle, max_part_bytes: int) -> Iterator[CutSlot]:
    """Yields each slot of a bundle in order; one slot's parts are in memory at a time.

    Raises:
        ContractError: a slot that no part can hold.
    """
    for slot in bundle.slots:
        columns = pack_large_values(slot.columns)
        parts = split(_id_of(slot), columns, max_part_bytes)
        yield CutSlot(content_digest(columns), [encode(part) for part in parts])


def _id_of(slot: SamplePart) -> SlotId:
    return SlotId(
        run_id=slot.run_id,
        attempt=slot.attempt,
        stream=slot.stream,
        rollout_id=slot.rollout_id,
        data_parallel_rank=slot.data_parallel_rank,
        slot=slot.slot,
        rollout_position=slot.rollout_position,
        sample_index=slot.sample_index,
    )
