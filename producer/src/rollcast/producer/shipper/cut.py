"""A bundle to the parts that Kafka gets, slot by slot."""

from collections.abc import Iterator
from dataclasses import dataclass

from rollcast.producer.spool.read import Bundle
from rollcast.schemas.errors import ContractError
from rollcast.schemas.framing import encode
from rollcast.schemas.parts import content_digest, pack_large_values, split


@dataclass(frozen=True, slots=True)
class SlotFrames:
    """One slot, ready to send.

    Attributes:
        digest: of its content.
        frames: its parts, encoded.
    """

    digest: bytes
    frames: list[bytes]


def cut(bundle: Bundle, max_part_bytes: int) -> Iterator[SlotFrames]:
    """Yields each slot of a bundle in order; one slot's parts are in memory at a time.

    Raises:
        ContractError: a slot that no part can hold.
    """
    for slot in bundle.slots:
        try:
            columns = pack_large_values(slot.columns)
            frames = [encode(part) for part in split(slot, columns, max_part_bytes)]
            digest = content_digest(columns)
        except (KeyError, ValueError, TypeError) as exc:
            # What a damaged bundle says of itself need not make sense.
            raise ContractError(f"slot {slot.slot} cannot be cut: {exc!r}") from exc
        yield SlotFrames(digest, frames)
