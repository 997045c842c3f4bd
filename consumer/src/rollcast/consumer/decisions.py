"""What the assembler decides about a record."""

from dataclasses import dataclass
from typing import TypeAlias

from rollcast.consumer.rollout import Place, Rollout, RolloutId
from rollcast.schemas import DpShard, SamplePart


@dataclass(frozen=True, slots=True)
class Complete:
    """Every count of the rollout is met: it can be restored, verified and published."""

    rollout: Rollout


@dataclass(frozen=True, slots=True)
class Incomplete:
    """Nothing new came for the rollout for too long: it is published with what is there."""

    rollout: Rollout


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The record repeats one that is held, or belongs to a rollout that is finished."""

    rollout_id: RolloutId


@dataclass(frozen=True, slots=True)
class Late:
    """The record is news for a rollout that was handed out as incomplete; it is held."""

    rollout_id: RolloutId


@dataclass(frozen=True, slots=True)
class Stale:
    """The record belongs to an attempt that a higher one has superseded."""

    rollout_id: RolloutId
    current_attempt: int


@dataclass(frozen=True, slots=True)
class Superseded:
    """An unfinished rollout is given up, because a higher attempt has begun to send it."""

    rollout_id: RolloutId
    by_attempt: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """The records of a rollout whose incomplete dump is durable are given up for room."""

    rollout_id: RolloutId


@dataclass(frozen=True, slots=True)
class Dropped:
    """The producer gave the rollout up and said so."""

    rollout_id: RolloutId
    reason: str


@dataclass(frozen=True, slots=True)
class Conflict:
    """A closing event contradicts another one; the first is kept, this record is not used.

    Attributes:
        rollout_id: their rollout.
        problem: what differs.
        held: the first one with the place of its record, when it is contradicted for the first time.
    """

    rollout_id: RolloutId
    problem: str
    held: tuple[DpShard, Place] | None = None


@dataclass(frozen=True, slots=True)
class Discarded:
    """Parts that were held turn out to be unusable.

    Attributes:
        rollout_id: their rollout.
        parts: the parts.
        places: of their records.
        problem: why.
    """

    rollout_id: RolloutId
    parts: tuple[SamplePart, ...]
    places: tuple[Place, ...]
    problem: str


Decision: TypeAlias = Complete | Duplicate | Late | Stale | Superseded | Evicted | Dropped | Conflict | Discarded
