"""The daemon: reads the records topic, has dumps written and announced, and only then lets the offset move."""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import KafkaError
from aiokafka.structs import OffsetAndMetadata

from rollcast.consumer.assembler import Assembler
from rollcast.consumer.config import ConsumeConfig
from rollcast.consumer.errors import ConsumeConfigError, ConsumeError, ShutdownTimeoutError
from rollcast.consumer.intake import Intake
from rollcast.consumer.outputs import Outputs
from rollcast.consumer.positions import Positions
from rollcast.consumer.publishing import Publishing
from rollcast.consumer.retry import Retry, StoppingError
from rollcast.consumer.rollout import Rollout
from rollcast.consumer.scratch import Scratch
from rollcast.consumer.stats import Stats
from rollcast.consumer.store import DumpStore, LocalDumpStore
from rollcast.consumer.topics import prepare_topics

_POLL_MS = 500
_COMMIT_EVERY_S = 1.0
_CLOSE_TIMEOUT_S = 5.0
_QUEUED_ROLLOUTS = 2
_MAX_PARTITION_FETCH_BYTES = 8 * 1024 * 1024
# While dumps cannot be written the reader waits, and a member that waits must not lose its partitions for that.
_MAX_POLL_INTERVAL_MS = 3_600_000

_log = logging.getLogger("rollcast.consumer")


class Daemon:
    """A member of the consumer group that turns records into dumps.

    `run()` returns after `shutdown()`: reading stops, dumps that are being written are finished, offsets are
    committed, the group is left; all within `shutdown_timeout_s`. `shutdown()` may be called at any time, also
    before `run()`, and more than once. A daemon runs once.

    Attributes:
        stats: counters.
        ready: set when the group has given it partitions (perhaps none).

    Args:
        config: its settings.
        store: keeps the dumps; by default local files at `config.dump_path`.

    Raises:
        TemplateError: `config.dump_path` is not a usable template.
    """

    def __init__(self, config: ConsumeConfig, *, store: DumpStore | None = None) -> None:
        self._config = config
        self._store = store if store is not None else LocalDumpStore(config.dump_path)
        self.stats = Stats()
        self.ready = asyncio.Event()
        self._stopping = asyncio.Event()
        self._bound: asyncio.Timeout | None = None
        self._retry = Retry(self._stopping, self.stats)
        self._assembler = Assembler(
            incomplete_after_s=config.incomplete_after_s,
            max_resident_bytes=config.max_resident_bytes,
        )
        self._scratch = Scratch(config.scratch_directory, config.max_scratch_bytes, config.limits)
        self._next_offsets: dict[int, int] = {}
        self._committed: dict[int, int] = {}
        # Counts assignments, so that what was begun under an earlier one is told from what belongs to this one.
        self._assignment = 0
        self._assigned_partitions: frozenset[TopicPartition] = frozenset()
        self._changed = asyncio.Event()
        self._placed = asyncio.Event()

    def shutdown(self) -> None:
        """Asks `run()` to end gracefully; called on the event loop's thread."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._bound is not None:
            self._bound.reschedule(asyncio.get_running_loop().time() + self._config.shutdown_timeout_s)

    async def run(self) -> None:
        """Serves until `shutdown()`.

        Raises:
            ConsumerError: it cannot start, or cannot go on; the message says why.
            ShutdownTimeoutError: work was abandoned; a thread may still be writing a temporary file.
        """
        try:
            await asyncio.to_thread(self._store.open)
        except OSError as exc:
            raise ConsumeConfigError(
                f"dumps cannot be kept at {self._config.dump_path!r}: {exc}; make that folder writable, or give "
                "another one with --dump-path"
            ) from exc
        try:
            await asyncio.to_thread(self._scratch.open)
        except OSError as exc:
            raise ConsumeConfigError(
                f"tensors cannot be kept at {self._config.scratch_directory}: {exc}; make that folder writable, or "
                "give another one with --scratch-dir"
            ) from exc
        if not await self._unless_stopping(prepare_topics(self._config)):
            return
        decode_pool = ThreadPoolExecutor(1, "rollcast-decode")
        dump_pool = ThreadPoolExecutor(1, "rollcast-dump")
        outputs, positions = Outputs(self._config), Positions(self._config)
        consumer = self._consumer()
        intake = Intake(
            self._config,
            assembler=self._assembler,
            scratch=self._scratch,
            store=self._store,
            outputs=outputs,
            retry=self._retry,
            stats=self.stats,
            pool=decode_pool,
        )
        publishing = Publishing(
            self._config,
            assembler=self._assembler,
            intake=intake,
            store=self._store,
            outputs=outputs,
            retry=self._retry,
            stats=self.stats,
            pool=dump_pool,
        )
        try:
            if await self._unless_stopping(_start(outputs, positions, consumer)):
                _log.info("reading %s as group %r", self._config.topics.records, self._config.group_id)
                await self._serve(consumer, positions, intake, publishing)
        except KafkaError as exc:
            raise ConsumeError(f"Kafka at {self._config.bootstrap_servers} failed for good: {exc!r}") from exc
        finally:
            await _close("consumer", consumer.stop)
            await _close("producer", outputs.stop)
            await _close("admin client", positions.stop)
            decode_pool.shutdown(wait=False, cancel_futures=True)
            dump_pool.shutdown(wait=False, cancel_futures=True)
            _log.info("stopped: %s", self.stats)

    async def _unless_stopping(self, work: Coroutine[Any, Any, None]) -> bool:
        """Returns whether the work was done before the daemon was told to stop; if not, it is cancelled."""
        doing, stopping = asyncio.create_task(work), asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({doing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                doing.result()
            return doing.done()
        finally:
            for task in (doing, stopping):
                task.cancel()
            await asyncio.wait({doing, stopping})

    async def _serve(self, consumer: Any, positions: Positions, intake: Intake, publishing: Publishing) -> None:
        queue: asyncio.Queue[Rollout | None] = asyncio.Queue(_QUEUED_ROLLOUTS)
        try:
            async with asyncio.timeout(None) as self._bound:
                if self._stopping.is_set():
                    return
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._publish(publishing, queue), name="publish")
                    async with asyncio.TaskGroup() as sources:
                        sources.create_task(self._place(consumer, positions), name="place")
                        sources.create_task(self._read(consumer, intake, queue), name="read")
                        sources.create_task(self._expire(queue), name="expire")
                        sources.create_task(self._commit_regularly(consumer), name="commit")
                    await queue.put(None)
                await self._commit(consumer)
        except TimeoutError as exc:
            raise ShutdownTimeoutError(self._config.shutdown_timeout_s) from exc
        except BaseExceptionGroup as group:
            raise _first(group) from group

    async def _place(self, consumer: Any, positions: Positions) -> None:
        """Seeks each newly assigned partition to its committed offset, or to its beginning; then `_read` may read."""
        while True:
            await self._retry.wait_for(self._changed)
            if self._stopping.is_set():
                return
            self._changed.clear()
            assignment, partitions = self._assignment, self._assigned_partitions
            try:
                starts = await self._retry.until_done(
                    "read the committed offsets", partial(positions.starts, consumer, partitions)
                )
            except StoppingError:
                return
            if assignment != self._assignment:
                continue
            for partition, offset in starts.items():
                consumer.seek(partition, offset)
            self._placed.set()
            self.ready.set()
            _log.info("assigned partitions %s", sorted(partition.partition for partition in partitions))

    async def _read(self, consumer: Any, intake: Intake, queue: asyncio.Queue[Rollout | None]) -> None:
        while True:
            await self._retry.wait_for(self._placed)
            if self._stopping.is_set():
                return
            assignment = self._assignment
            try:
                batches = await consumer.getmany(timeout_ms=_POLL_MS)
            except KafkaError as exc:
                if not exc.retriable:
                    raise
                _log.warning("could not read: %r", exc)
                await self._retry.pause(_POLL_MS / 1000)
                continue
            if assignment != self._assignment:
                # Assigned anew meanwhile: these may come from a position that `_place` corrects.
                continue

            def still_ours(assignment: int = assignment) -> bool:
                return assignment == self._assignment

            for topic_partition, records in batches.items():
                try:
                    await intake.take(topic_partition.partition, records, still_ours, queue.put)
                except StoppingError:
                    return
                if still_ours():
                    self._next_offsets[topic_partition.partition] = records[-1].offset + 1

    async def _expire(self, queue: asyncio.Queue[Rollout | None]) -> None:
        while True:
            await self._retry.pause(min(1.0, self._config.incomplete_after_s / 4))
            if self._stopping.is_set():
                return
            for incomplete in self._assembler.expire(asyncio.get_running_loop().time()):
                await queue.put(incomplete.rollout)

    async def _publish(self, publishing: Publishing, queue: asyncio.Queue[Rollout | None]) -> None:
        while (rollout := await queue.get()) is not None:
            try:
                await publishing.publish(rollout)
            except StoppingError as exc:
                _log.warning("%s is left for the next start: could not %s", rollout.id, exc)
            # Its scratch space is free only when nothing refers to it, and the next one may be long in coming.
            del rollout

    async def _commit_regularly(self, consumer: Any) -> None:
        while not self._stopping.is_set():
            await self._retry.pause(_COMMIT_EVERY_S)
            await self._commit(consumer)

    async def _commit(self, consumer: Any) -> None:
        """Commits the low watermarks that have moved; one that cannot be committed now is tried again later."""
        marks = {
            partition: self._assembler.low_watermark(partition, next_offset)
            for partition, next_offset in self._next_offsets.items()
        }
        moved = {partition: mark for partition, mark in marks.items() if mark > self._committed.get(partition, 0)}
        if not moved:
            return
        assignment = self._assignment
        offsets = {
            TopicPartition(self._config.topics.records, partition): OffsetAndMetadata(mark, "")
            for partition, mark in moved.items()
        }
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await consumer.commit(offsets)
        except (KafkaError, TimeoutError) as exc:
            _log.warning("offsets could not be committed now: %r", exc)
        else:
            if assignment == self._assignment:
                self._committed |= moved

    def _revoked(self, partitions: Collection[TopicPartition]) -> None:
        # Whoever gets them reads from the watermark on; nothing here is waited for, so the rebalance is quick.
        self._assignment += 1
        self._scratch.forget()
        self._placed.clear()
        for topic_partition in partitions:
            self._assembler.forget(topic_partition.partition)
            self._next_offsets.pop(topic_partition.partition, None)
            self._committed.pop(topic_partition.partition, None)

    def _assigned(self, partitions: Collection[TopicPartition]) -> None:
        self._assignment += 1
        self._assigned_partitions = frozenset(partitions)
        self._changed.set()

    def _consumer(self) -> Any:
        config = self._config
        consumer = AIOKafkaConsumer(
            bootstrap_servers=config.bootstrap_servers,
            client_id="rollcast-consume",
            group_id=config.group_id,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            session_timeout_ms=config.session_timeout_ms,
            heartbeat_interval_ms=max(1, config.session_timeout_ms // 4),
            max_poll_interval_ms=_MAX_POLL_INTERVAL_MS,
            max_partition_fetch_bytes=_MAX_PARTITION_FETCH_BYTES,
            metadata_max_age_ms=config.metadata_max_age_ms,
        )
        consumer.subscribe([config.topics.records], listener=_Listener(self._revoked, self._assigned))
        return consumer


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka ships no types
    def __init__(
        self,
        revoked: Callable[[Collection[TopicPartition]], None],
        assigned: Callable[[Collection[TopicPartition]], None],
    ) -> None:
        self._revoked, self._assigned = revoked, assigned

    def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        """Drops their open work."""
        self._revoked(revoked)

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        """Has their positions looked up."""
        self._assigned(assigned)


async def _start(outputs: Outputs, positions: Positions, consumer: Any) -> None:
    await outputs.start()
    await positions.start()
    await consumer.start()


async def _close(what: str, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
    # A task of its own: with the brokers away aiokafka lets its own CancelledError through, which is not ours.
    closing = asyncio.create_task(close())
    await asyncio.wait({closing}, timeout=_CLOSE_TIMEOUT_S)
    if not closing.done():
        closing.cancel()
        _log.warning("the %s could not be closed within %g s", what, _CLOSE_TIMEOUT_S)
    elif closing.cancelled() or closing.exception() is not None:
        problem = "cancelled" if closing.cancelled() else repr(closing.exception())
        _log.warning("the %s could not be closed in order: %s", what, problem)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
