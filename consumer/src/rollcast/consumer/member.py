"""A member of the consumer group: joins, finds its place, reads, commits."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError, NoOffsetForPartitionError, OffsetOutOfRangeError
from aiokafka.structs import OffsetAndMetadata

from rollcast.consumer.assembler import Assembler
from rollcast.consumer.closing import CLOSE_TIMEOUT_S, Closing
from rollcast.consumer.config import ConsumeConfig
from rollcast.consumer.dead_letters import DeadLetters
from rollcast.consumer.gaps import Gaps
from rollcast.consumer.intake import Intake
from rollcast.consumer.kafka_client import group_consumer
from rollcast.consumer.positions import Positions
from rollcast.consumer.reading_clock import ReadingClock
from rollcast.consumer.retry import Retry, StoppingError
from rollcast.consumer.rollout import OffsetSpan, Rollout
from rollcast.consumer.stats import Stats

_POLL_MS = 500
# Bounds how long the event loop is kept from other work by one batch of small records.
_MAX_POLL_RECORDS = 500
_COMMIT_EVERY_S = 1.0
_LAG_TIMEOUT_S = 5.0

_log = logging.getLogger("rollcast.consumer")


class Member:
    """One membership, with a Kafka client of its own; `leave` ends it for good.

    Attributes:
        waiting_since: loop time since when it has waited for records in vain; None while it is busy with some.

    Args:
        config: of the daemon.
        assembler: is told which partitions went.
        intake: takes what is read.
        letters: tell of what could not be read.
        gaps: remembers what could not be read.
        clock: is advanced.
        retry: waits for what can succeed later.
        stats: are counted.
        ready: is set when it has its partitions (perhaps none).
    """

    def __init__(
        self,
        config: ConsumeConfig,
        *,
        assembler: Assembler,
        intake: Intake,
        letters: DeadLetters,
        gaps: Gaps,
        clock: ReadingClock,
        retry: Retry,
        stats: Stats,
        ready: asyncio.Event,
    ) -> None:
        self._config = config
        self._assembler, self._intake, self._letters, self._gaps = assembler, intake, letters, gaps
        self._clock, self._retry, self._stats, self._ready = clock, retry, stats, ready
        self.waiting_since: float | None = asyncio.get_running_loop().time()
        self._positions = Positions(config)
        self._next_offsets: dict[int, int] = {}
        self._committed: dict[int, int] = {}
        # Committed and next offset of partitions that were revoked and are not assigned anew yet.
        self._had: dict[int, tuple[int, int]] = {}
        # Counts assignments, so that what was begun under an earlier one is told from what belongs to this one.
        self._assignment = 0
        self._partitions: frozenset[TopicPartition] = frozenset()
        self._committing: asyncio.Timeout | None = None
        self._changed = asyncio.Event()
        self._placed = asyncio.Event()
        # A fetch that was waiting when the group came for its partitions is over before `_place` seeks: it would return
        # records from there, which `_read_once` discards, and nobody would read them again.
        self._fetching = asyncio.Lock()
        self._left = False
        self._consumer = group_consumer(config, revoked=self._revoked, assigned=self._assigned)

    @property
    def placed(self) -> bool:
        """Whether it knows its partitions and where to read them."""
        return self._placed.is_set()

    @property
    def partition_count(self) -> int:
        """Partitions that it has now."""
        return len(self._partitions)

    async def run(self, hand_out: Callable[[Rollout], Awaitable[None]]) -> None:
        """Hands out what is assembled, until the daemon stops."""
        _log.info("joining group %r to read %s", self._config.group_id, self._config.topics.records)
        if not await self._retry.unless_stopping(self._join()):
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._place(), name="place")
            tasks.create_task(self._read(hand_out), name="read")
            tasks.create_task(self._commit_regularly(), name="commit")

    async def commit(self) -> None:
        """Commits the low watermarks that have moved; one that cannot be committed now is tried again later."""
        marks = {
            partition: self._assembler.low_watermark(partition, next_offset)
            for partition, next_offset in self._next_offsets.items()
        }
        moved = {partition: mark for partition, mark in marks.items() if mark > self._committed.get(partition, -1)}
        if not moved:
            return
        assignment = self._assignment
        offsets = {self._at(partition): OffsetAndMetadata(mark, "") for partition, mark in moved.items()}
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S) as self._committing:
                await self._consumer.commit(offsets)
        except (KafkaError, TimeoutError) as exc:
            _log.warning("offsets could not be committed now: %r", exc)
        else:
            if assignment == self._assignment:
                self._committed |= moved
        finally:
            self._committing = None

    async def lag(self) -> int | None:
        """Returns how many offsets of its partitions it has not read; None if Kafka does not tell in time."""
        if not self.placed:
            return None
        lag = 0
        try:
            async with asyncio.timeout(min(_LAG_TIMEOUT_S, self._config.stall_after_s)):
                ends = await self._consumer.end_offsets(list(self._partitions))
                for topic_partition, end in ends.items():
                    lag += max(0, end - await self._consumer.position(topic_partition))
        except (KafkaError, TimeoutError):
            return None
        return lag

    async def leave(self, closing: Closing) -> None:
        """Leaves the group and gives up the client; what was not committed is read again by whoever comes next."""
        self._revoked(self._partitions)
        self._left = True
        await closing.close({"consumer": self._consumer.stop, "admin client": self._positions.stop})

    async def _join(self) -> None:
        await self._retry.until_done("reach Kafka", self._positions.start)
        await self._retry.until_done("join the group", self._consumer.start)

    async def _place(self) -> None:
        """Seeks each newly assigned partition to its committed offset, or to its beginning; then `_read` may read."""
        while True:
            await self._retry.wait_for(self._changed)
            if self._retry.stopping:
                return
            self._changed.clear()
            assignment, partitions = self._assignment, self._partitions
            try:
                starts = await self._retry.until_done(
                    "read the committed offsets", partial(self._positions.starts, self._consumer, partitions)
                )
                await self._record(self._lost_with_its_log(starts))
            except StoppingError:
                return
            async with self._fetching:
                if assignment != self._assignment:
                    continue
                for topic_partition, offset in starts.items():
                    self._had.pop(topic_partition.partition, None)
                    self._start_at(topic_partition, offset)
                self._placed.set()
            self._ready.set()
            _log.info("assigned partitions %s", sorted(partition.partition for partition in partitions))

    async def _read(self, hand_out: Callable[[Rollout], Awaitable[None]]) -> None:
        while True:
            await self._retry.wait_for(self._placed)
            if self._retry.stopping:
                return
            try:
                await self._read_once(hand_out)
            except StoppingError:
                return

    async def _read_once(self, hand_out: Callable[[Rollout], Awaitable[None]]) -> None:
        assignment = self._assignment
        batches: Mapping[TopicPartition, Sequence[Any]] = {}

        async def fetch() -> None:
            nonlocal batches
            batches = await self._consumer.getmany(timeout_ms=_POLL_MS, max_records=_MAX_POLL_RECORDS)

        try:
            async with self._fetching:
                # While the group has no leader, or Kafka is away, it takes far longer than its timeout.
                await self._retry.unless_stopping(fetch())
        except OffsetOutOfRangeError as exc:
            if assignment == self._assignment:
                await self._pass_gaps(exc.args[0])
            return
        except NoOffsetForPartitionError:
            # Assigned anew meanwhile: `_place` finds the beginning.
            return
        except KafkaError as exc:
            if not exc.retriable:
                raise
            _log.warning("could not read: %r", exc)
            await self._retry.pause(_POLL_MS / 1000)
            return
        # Assigned anew meanwhile, these may come from a position that `_place` corrects.
        if batches and assignment == self._assignment:
            self.waiting_since = None
            await self._take(batches, hand_out)
            self.waiting_since = asyncio.get_running_loop().time()
        await self._note_what_is_read(assignment)

    async def _note_what_is_read(self, assignment: int) -> None:
        """Advances the clock if nothing is left of what Kafka had when it last answered."""
        if assignment != self._assignment:
            # The client may have given up these partitions already; it refuses to tell their position.
            return
        answered_ms = []
        for partition in self._partitions:
            end, answered = self._consumer.last_stable_offset(partition), self._consumer.last_poll_timestamp(partition)
            if end is None or answered is None or await self._consumer.position(partition) < end:
                return
            answered_ms.append(answered)
        if answered_ms and assignment == self._assignment:
            self._clock.advance(asyncio.get_running_loop().time() - (time.time() - min(answered_ms) / 1000))

    async def _take(
        self, batches: Mapping[TopicPartition, Sequence[Any]], hand_out: Callable[[Rollout], Awaitable[None]]
    ) -> None:
        assignment = self._assignment

        def still_ours() -> bool:
            return assignment == self._assignment

        for topic_partition, records in batches.items():
            await self._intake.take(topic_partition.partition, records, still_ours, hand_out)
            if still_ours():
                self._next_offsets[topic_partition.partition] = records[-1].offset + 1
        self._stats.note_progress()

    async def _pass_gaps(self, wanted: Mapping[TopicPartition, int]) -> None:
        """Goes on at the beginning of partitions that do not have the offsets `wanted`, and records what is lost."""
        assignment, at = self._assignment, list(wanted)
        firsts = await self._retry.until_done(
            "find the beginning of the log", lambda: self._consumer.beginning_offsets(at)
        )
        ends = await self._retry.until_done("find the end of the log", lambda: self._consumer.end_offsets(at))
        gaps = {}
        for topic_partition, offset in wanted.items():
            partition, first, end = topic_partition.partition, firsts[topic_partition], ends[topic_partition]
            if offset < first:
                gaps[OffsetSpan(partition, offset, first - 1)] = f"the log begins at {first}"
            elif offset > end:
                gaps[OffsetSpan(partition, end, offset - 1)] = f"the log ends at {end} and is read anew"
        # Before any position moves, so that a crash here repeats it.
        await self._record(gaps)
        if assignment != self._assignment:
            return
        for gap in gaps:
            topic_partition = self._at(gap.partition)
            if gap.first == ends[topic_partition]:
                self._assembler.unpin(gap.partition)
                self._committed.pop(gap.partition, None)
            self._start_at(topic_partition, firsts[topic_partition])

    async def _record(self, gaps: Mapping[OffsetSpan, str]) -> None:
        await self._letters.deliver([self._gaps.note(gap, cause) for gap, cause in gaps.items()])

    def _lost_with_its_log(self, starts: Mapping[TopicPartition, int]) -> dict[OffsetSpan, str]:
        """Returns what had been read and not committed of partitions whose committed offset is gone.

        Offsets never go back by themselves: the topic was deleted, and with it the group's offsets in it.
        """
        lost = {}
        for topic_partition, start in starts.items():
            committed, read_to = self._had.get(topic_partition.partition, (0, 0))
            if start < committed < read_to:
                gap = OffsetSpan(topic_partition.partition, committed, read_to - 1)
                lost[gap] = f"the log was replaced and is read anew from {start}"
        return lost

    async def _commit_regularly(self) -> None:
        while not self._retry.stopping:
            await self._retry.pause(_COMMIT_EVERY_S)
            await self.commit()

    def _start_at(self, topic_partition: TopicPartition, offset: int) -> None:
        self._consumer.seek(topic_partition, offset)
        self._next_offsets[topic_partition.partition] = offset

    def _at(self, partition: int) -> TopicPartition:
        return TopicPartition(self._config.topics.records, partition)

    def _revoked(self, partitions: Collection[TopicPartition]) -> None:
        # Whoever gets them reads from the watermark on; nothing here is waited for, so the rebalance is quick.
        if self._left:
            return
        self._assignment += 1
        self._intake.forget_places()
        self._placed.clear()
        if self._committing is not None and not self._committing.expired():
            # aiokafka would repeat a failed commit as a member of the next generation, which may read other partitions.
            self._committing.reschedule(asyncio.get_running_loop().time())
        for topic_partition in partitions:
            partition = topic_partition.partition
            self._assembler.forget(partition)
            read_to, committed = self._next_offsets.pop(partition, None), self._committed.pop(partition, None)
            if read_to is not None and committed is not None:
                self._had[partition] = (committed, read_to)

    def _assigned(self, partitions: Collection[TopicPartition]) -> None:
        if self._left:
            return
        self._assignment += 1
        self._partitions = frozenset(partitions)
        self._changed.set()
