"""What a publish returns, and the short words for why a rollout is dropped."""

import time
from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum

from rollcast.producer.errors import SpoolError, SpoolFullError
from rollcast.schemas.errors import ContractError


class PublishStatus(StrEnum):
    """What became of a rollout on this rank."""

    PUBLISHED = "published"
    DROPPED = "dropped"
    NOT_INVOLVED = "not involved"
    DISABLED = "disabled"


class DropReason(StrEnum):
    """Why something was not published, in one word; few, because each one is a series on `/metrics`."""

    SPOOL_FULL = "spool_full"
    BAD_DATA = "bad_data"
    MISMATCH = "mismatch"
    REPEATED = "repeated"
    NOT_CREATED = "not_created"
    NOT_COPIED = "not_copied"
    NOT_COMMITTED = "not_committed"
    UNEXPECTED = "unexpected"
    OFF = "off"


def drop_reason_of(error: Exception) -> DropReason:
    """Returns the word for what went wrong before anything was copied."""
    if isinstance(error, SpoolFullError):
        return DropReason.SPOOL_FULL
    if isinstance(error, (ContractError, TypeError, ValueError)):
        return DropReason.BAD_DATA
    return DropReason.NOT_CREATED if isinstance(error, (SpoolError, OSError)) else DropReason.UNEXPECTED


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishResult:
    """What one `publish` did on this rank.

    Attributes:
        status: what became of the rollout.
        stall_s: seconds that the training thread spent; the four below are its parts.
        prepare_s: of these, planning the bundle and reserving its file.
        room_s: waiting for room in the spool.
        agree_s: waiting for the peers' votes after the copy, peers that came late included.
        copy_s: copying, and sending where peers cannot share the spool.
        copied_bytes: bytes that this rank copied.
        raw_bytes: tensor bytes of the whole shard.
        reason: why it was not published.
    """

    status: PublishStatus
    stall_s: float = 0.0
    prepare_s: float = 0.0
    room_s: float = 0.0
    agree_s: float = 0.0
    copy_s: float = 0.0
    copied_bytes: int = 0
    raw_bytes: int = 0
    reason: str | None = None


class Stopwatch:
    """Adds up where the time of one publish goes.

    Attributes:
        laps: seconds by phase.
    """

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()
        self.laps: defaultdict[str, float] = defaultdict(float)

    @property
    def total_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started

    def lap(self, phase: str) -> None:
        """Books the time since the last lap on `phase`."""
        now = time.perf_counter()
        self.laps[phase] += now - self._last
        self._last = now
