"""Values of the records topic to events, or to what is wrong with them. CPU work, for a worker thread."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rollcast.consumer.errors import InvalidRecordError
from rollcast.consumer.validity import check_event
from rollcast.schemas import ContractError, DpShard, Limits, SamplePart, decode


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a record is no usable event.

    Attributes:
        kind: one of `stats.DEAD_LETTER_KINDS`.
        text: for a person.
        run_id: whose record it is; empty if that cannot be told.
    """

    kind: str
    text: str
    run_id: str = ""


Decoded: TypeAlias = SamplePart | DpShard | Problem


def decode_all(values: Sequence[bytes], limits: Limits) -> list[Decoded]:
    """Returns an event that has passed `check_event`, or a problem, for each value; whatever the bytes are."""
    return [_decode(value, limits) for value in values]


def _decode(value: bytes, limits: Limits) -> Decoded:
    try:
        event = decode(value, limits)
        if not isinstance(event, (SamplePart, DpShard)):
            return Problem("decode", f"a {type(event).__name__} has no place on this topic")
        check_event(event, limits)
    except (ContractError, InvalidRecordError) as exc:
        return Problem("decode", str(exc))
    return event
