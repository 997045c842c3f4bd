"""What the chaos test sends, and what must come of it; both follow from the seed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final

from fixtures.frames import ShardSource, events_of
from fixtures.installation import PART_BYTES, shards
from rollcast.schemas import DpShard, SamplePart, encode, record_key

ROLLOUTS: Final = 40
RUNS: Final = ("run-a", "run-b", "run-c")
GARBAGE_SHARE: Final = 0.01
RESHIPPED_SHARE: Final = 0.2
_DISORDER: Final = 40
"""By how many records of its run a record can be early or late: about two rollouts."""

Record = tuple[bytes | None, bytes | None]
"""Key and value."""

Events = Sequence[SamplePart | DpShard]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What must become of one rollout.

    Attributes:
        run_id: its run.
        rollout_id: its number.
        attempt: the one that counts.
        sources: the shards as this attempt has them.
        missing: what the manifest of its incomplete dump must say; None if the dump is complete.
        withheld_slots: rank and slot of the samples that are not in its incomplete dump.
        earlier: the shards of an earlier attempt that was sent in full, whose dump may stand beside.
        dropped: whether the producer dropped it, so that there is no dump.
    """

    run_id: str
    rollout_id: int
    attempt: int
    sources: Sequence[ShardSource]
    missing: dict[str, Any] | None = None
    withheld_slots: frozenset[tuple[int, int]] = frozenset()
    earlier: Sequence[ShardSource] | None = None
    dropped: bool = False

    def __str__(self) -> str:
        return f"{self.run_id} rollout {self.rollout_id}"


class Story:
    """Three runs that send at the same time, out of order and partly twice, with garbage in between.

    In one rollout of `run-a` something is missing, one of `run-b` is dropped by its producer, and the trainer of
    `run-c` crashes in the middle of a rollout or after it; its next attempt sends that one again, with other content.

    Attributes:
        outcomes: of every rollout.
        bursts: the records, in the order in which they are sent; each burst at once.
        garbage: the values of all records that are none.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self.outcomes: list[Outcome] = []
        self.garbage: set[bytes] = set()
        counts = [len(range(index, ROLLOUTS, len(RUNS))) for index in range(len(RUNS))]
        # Early, so that it comes of age while the others are still sent.
        self._lacking = (RUNS[0], random.randrange(counts[0] // 2))
        self._dropped = (RUNS[1], random.randrange(counts[1]))
        self._superseded = (RUNS[2], random.randrange(2, counts[2] - 2))
        streams = [self._run(run_id, count) for run_id, count in zip(RUNS, counts, strict=True)]
        self.bursts = list(self._bursts(self._with_garbage(self._merged(streams))))

    @property
    def record_count(self) -> int:
        """Records to send."""
        return sum(map(len, self.bursts))

    def _run(self, run_id: str, count: int) -> list[Record]:
        records = [record for rollout_id in range(count) for record in self._rollout(run_id, rollout_id)]
        late = sorted((index + self._random.uniform(0, _DISORDER), index) for index in range(len(records)))
        return [records[index] for _, index in late]

    def _rollout(self, run_id: str, rollout_id: int) -> list[Record]:
        place = (run_id, rollout_id)
        resumed = run_id == self._superseded[0] and rollout_id >= self._superseded[1]
        attempt = 2 if resumed else 1
        sources, events = self._made(run_id, rollout_id, attempt)
        outcome = Outcome(run_id=run_id, rollout_id=rollout_id, attempt=attempt, sources=sources)
        before: list[Record] = []
        if place == self._dropped:
            outcome = replace(outcome, dropped=True)
            events = [_as_dropped(event) for event in events if isinstance(event, DpShard)]
        elif place == self._lacking:
            withheld = self._withheld(events)
            slots = {(event.data_parallel_rank, event.slot) for event in withheld if isinstance(event, SamplePart)}
            outcome = replace(outcome, missing=missing(events, withheld), withheld_slots=frozenset(slots))
            events = [event for event in events if event not in withheld]
        elif place == self._superseded:
            earlier_sources, earlier = self._made(run_id, rollout_id, 1)
            if self._random.random() < 0.5:
                outcome = replace(outcome, earlier=earlier_sources)
            else:
                earlier = self._random.sample(earlier, len(earlier) // 2)
            before = self._shipped(earlier)
        self.outcomes.append(outcome)
        return before + self._shipped(events)

    def _made(self, run_id: str, rollout_id: int, attempt: int) -> tuple[list[ShardSource], list[SamplePart | DpShard]]:
        sources = shards(
            self._random.getrandbits(32),
            shard_count=self._random.randint(1, 3),
            samples=self._random.randint(1, 6),
            tokens=self._random.randint(20, 8000),
        )
        return sources, list(events_of(run_id, attempt, rollout_id, sources, max_part_bytes=PART_BYTES))

    def _withheld(self, events: Events) -> Events:
        """Returns what never arrives: one record, or all of a shard."""
        one = self._random.choice(events)
        if self._random.random() < 2 / 3 or len({event.data_parallel_rank for event in events}) == 1:
            return [one]
        return [event for event in events if event.data_parallel_rank == one.data_parallel_rank]

    def _shipped(self, events: Events) -> list[Record]:
        """Returns the records in any order, those of some shards twice."""
        twice = {
            rank
            for rank in sorted({event.data_parallel_rank for event in events})
            if self._random.random() < RESHIPPED_SHARE
        }
        sent = [*events, *(event for event in events if event.data_parallel_rank in twice)]
        self._random.shuffle(sent)
        return [(record_key(event.run_id, event.rollout_id), encode(event)) for event in sent]

    def _merged(self, streams: Sequence[list[Record]]) -> list[Record]:
        turns = [index for index, stream in enumerate(streams) for _ in stream]
        self._random.shuffle(turns)
        following = [iter(stream) for stream in streams]
        return [next(following[turn]) for turn in turns]

    def _with_garbage(self, records: list[Record]) -> list[Record]:
        polluted = list(records)
        for _ in range(max(6, round(GARBAGE_SHARE * len(records)))):
            key, frame = self._random.choice(records)
            value = self._spoilt(frame or b"")
            self.garbage.add(value)
            polluted.insert(self._random.randrange(len(polluted) + 1), (key, value))
        return polluted

    def _spoilt(self, frame: bytes) -> bytes:
        random = self._random
        return random.choice(
            (
                random.randbytes(random.randrange(200)),
                frame + random.randbytes(5),
                frame[: random.randrange(len(frame) - 1)],
                frame[:2] + random.randbytes(8) + frame[10:],
            )
        )

    def _bursts(self, records: list[Record]) -> Iterator[list[Record]]:
        while records:
            size = self._random.randint(4, 24)
            yield records[:size]
            records = records[size:]


def missing(events: Events, withheld: Events) -> dict[str, Any]:
    """Returns what the manifest must say of a rollout that lacks one record, or all of a shard."""
    arrived = [event for event in events if event not in withheld]
    closed = {event.data_parallel_rank for event in arrived if isinstance(event, DpShard)}
    # Without any closing event, only the shards of which something arrived are known.
    known = {event.data_parallel_rank for event in (events if closed else arrived)}
    slots: dict[str, list[int]] = {}
    for event in withheld:
        if isinstance(event, SamplePart) and event.data_parallel_rank in closed:
            slots.setdefault(str(event.data_parallel_rank), []).append(event.slot)
    return {"shards": sorted(known - closed), "shard_count_known": bool(closed), "slots": slots}


def _as_dropped(shard: DpShard) -> DpShard:
    return replace(shard, dropped_reason="the spool was full", slot_digests=(), part_counts=())
