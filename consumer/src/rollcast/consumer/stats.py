"""Counters of a running daemon."""

import time
from collections import Counter
from dataclasses import dataclass, field

from rollcast.schemas.sizes import counted, size_in_words

DEAD_LETTER_KINDS = ("decode", "invalid", "conflict", "content", "unusable")

MAX_RUNS = 100
"""Runs that are told apart in counters."""

OTHER_RUNS = "(other runs)"
"""Stands for the runs beyond them."""


@dataclass(kw_only=True, slots=True)
class Stats:
    """What the daemon has done since it started.

    Reasons are duplicate, late (for a rollout that was written as incomplete), stale, and those of dead letters.

    Attributes:
        records: records read.
        record_bytes: their size.
        dumps: complete dumps written.
        incomplete_dumps: incomplete dumps written.
        already_published: rollouts found in the store with the same or a higher attempt.
        duplicates: records that repeated one already held or finished.
        stale: records of a superseded attempt.
        superseded: unfinished rollouts given up for a higher attempt.
        dropped: rollouts that the producer gave up.
        evicted: rollouts with an incomplete dump whose records had to make room.
        given_up: rollouts written as incomplete before their time, to make room.
        dead_letters: records that could not be used, by reason, one of `DEAD_LETTER_KINDS`.
        lost_dead_letters: those of them that Kafka refused for good.
        failed_metrics: metrics that could not be computed from what a rollout holds, by name.
        by_run: records that were not simply used, by run and reason. The run is empty for what cannot be decoded,
            and `OTHER_RUNS` for the runs that are too many.
        retries: failed tries of writing a dump, sending a result or reaching Kafka.
        gaps: ranges of offsets that were gone before they were read.
        gap_offsets: offsets in those ranges.
        client_rebuilds: Kafka clients replaced because they brought nothing.
        dump_seconds: time from a rollout that was handed out to its durable dump, summed.
        progressed_at: `time.monotonic()` when records were last taken or a dump written.
    """

    records: int = 0
    record_bytes: int = 0
    dumps: int = 0
    incomplete_dumps: int = 0
    already_published: int = 0
    duplicates: int = 0
    stale: int = 0
    superseded: int = 0
    dropped: int = 0
    evicted: int = 0
    given_up: int = 0
    dead_letters: Counter[str] = field(default_factory=Counter)
    lost_dead_letters: int = 0
    failed_metrics: Counter[str] = field(default_factory=Counter)
    by_run: Counter[tuple[str, str]] = field(default_factory=Counter, repr=False)
    retries: int = 0
    gaps: int = 0
    gap_offsets: int = 0
    client_rebuilds: int = 0
    dump_seconds: float = 0.0
    progressed_at: float = field(default_factory=time.monotonic)
    _runs: set[str] = field(default_factory=set, repr=False)

    def in_words(self) -> str:
        """Returns the end line of a log: what was read and written, and what went wrong."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.dead_letters.items()))
        return (
            f"{counted(self.records, 'record')} ({size_in_words(self.record_bytes)}) read, "
            f"{counted(self.dumps, 'dump')} written, {counted(self.incomplete_dumps, 'incomplete one')}, "
            f"{counted(self.dead_letters.total(), 'dead letter')}"
            f"{f' ({reasons})' if reasons else ''}"
        )

    def note_progress(self) -> None:
        """Notes that records were taken or a dump written just now."""
        self.progressed_at = time.monotonic()

    def count(self, run_id: str, reason: str) -> None:
        """Counts a record of that run."""
        if run_id not in self._runs and len(self._runs) >= MAX_RUNS:
            run_id = OTHER_RUNS
        self._runs.add(run_id)
        self.by_run[run_id, reason] += 1
