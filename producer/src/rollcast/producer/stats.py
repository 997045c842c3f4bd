"""Counters of a rank, for the trainer and, through a file in the spool, for the shipper's `/metrics`."""

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rollcast.producer.quota import Quota
from rollcast.producer.result import DropReason
from rollcast.schemas.topics import file_name_for

_HEARTBEAT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PublisherStats:
    """What a rank has done since its publisher was made. Shards are counted by their writer alone.

    Attributes:
        published: bundles committed: shards of rollouts, and policy-loss calls.
        dropped: the same that were dropped, by `DropReason`; every reason is there.
        bytes: tensor bytes of what was published.
        stall_seconds: seconds that the training thread spent in `publish`.
        spool_bytes: what the spool held when it was measured, of all ranks and runs that share it, and what this rank
            and its peers have added since.
        spool_bundles: number of bundles of the same.
        spool_marks: number of marks of dropped rollouts of the same.
        spool_measured_at_ms: when that was, in milliseconds since the epoch: about every second once the first rollout
            is published; before it and after `close`, when asked and some seconds old; 0 where there is no spool.
    """

    published: int
    dropped: Mapping[str, int]
    bytes: int
    stall_seconds: float
    spool_bytes: int = 0
    spool_bundles: int = 0
    spool_marks: int = 0
    spool_measured_at_ms: int = 0


class Counters:
    """The numbers behind `PublisherStats`; any thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._published = self._bytes = 0
        self._stall_seconds = 0.0
        # A series that appears with its first failure hides that failure from a rate().
        self._dropped = {str(reason): 0 for reason in DropReason}

    def published(self, size: int) -> None:
        """Counts a committed bundle."""
        with self._lock:
            self._published += 1
            self._bytes += size

    def dropped(self, reason: DropReason) -> None:
        """Counts what is not published."""
        with self._lock:
            self._dropped[reason] += 1

    def stalled(self, seconds: float) -> None:
        """Adds the time of one publish."""
        with self._lock:
            self._stall_seconds += seconds

    def snapshot(self, quota: Quota | None = None) -> PublisherStats:
        """Returns the numbers as they are now, and what is known of the spool."""
        with self._lock:
            counted = PublisherStats(
                published=self._published,
                dropped=dict(self._dropped),
                bytes=self._bytes,
                stall_seconds=self._stall_seconds,
            )
        if quota is None:
            return counted
        held = quota.held
        return replace(
            counted,
            spool_bytes=held.size,
            spool_bundles=held.bundles,
            spool_marks=held.marks,
            spool_measured_at_ms=quota.measured_at_ms,
        )


class StatsFile:
    """`.stats-<run>-rank<rank>.json` in the spool; whole at every moment."""

    def __init__(self, spool: Path, run_id: str, rank: int, counters: Counters) -> None:
        self.path = spool / f".stats-{file_name_for(run_id)}-rank{rank}.json"
        self._run_id, self._rank, self._counters = run_id, rank, counters
        self._written: PublisherStats | None = None
        self._next_beat = 0.0

    def write(self) -> None:
        """Writes what has changed; unchanged numbers every ten seconds, to show that the trainer lives.

        Raises:
            OSError: the disk does not take it.
        """
        stats = self._counters.snapshot()
        now = time.monotonic()
        if stats == self._written and now < self._next_beat:
            return
        content = {
            "run_id": self._run_id,
            "rank": self._rank,
            "published": stats.published,
            "dropped": stats.dropped,
            "bytes": stats.bytes,
            "stall_seconds": stats.stall_seconds,
            "updated_at_ms": time.time_ns() // 1_000_000,
        }
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(json.dumps(content))
        part.rename(self.path)
        self._written, self._next_beat = stats, now + _HEARTBEAT_S
