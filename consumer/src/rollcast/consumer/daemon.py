"""The daemon: reads the records topic, has dumps written and announced, and only then lets the offset move."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial

from aiokafka.errors import KafkaError

from rollcast.consumer.assembler import Assembler
from rollcast.consumer.closing import Closing
from rollcast.consumer.config import ConsumeConfig
from rollcast.consumer.dead_letters import DeadLetters
from rollcast.consumer.errors import ConsumeConfigError, ConsumeError, ShutdownTimeoutError
from rollcast.consumer.folder_trouble import folder_trouble
from rollcast.consumer.gaps import Gaps
from rollcast.consumer.health import Health
from rollcast.consumer.http_server import serving
from rollcast.consumer.intake import Intake
from rollcast.consumer.member import Member
from rollcast.consumer.outputs import Outputs
from rollcast.consumer.publishing import Publishing
from rollcast.consumer.reading_clock import ReadingClock
from rollcast.consumer.retry import Retry, StoppingError
from rollcast.consumer.rollout import Rollout
from rollcast.consumer.scratch import Scratch
from rollcast.consumer.stats import Stats
from rollcast.consumer.store import DumpStore, LocalDumpStore
from rollcast.consumer.telemetry import DaemonCollector, registry_of
from rollcast.consumer.topics import prepare_topics
from rollcast.consumer.waiting import Waiting
from rollcast.consumer.watchdog import ClientStalledError, Watchdog
from rollcast.schemas.sizes import counted

_QUEUED_ROLLOUTS = 2

_log = logging.getLogger("rollcast.consumer")


class Daemon:
    """A member of the consumer group that turns records into dumps.

    `run()` returns after `shutdown()`: reading stops, dumps that are being written are finished, offsets are
    committed; all within `shutdown_timeout_s`. Then the connections are closed, which takes at most
    `closing.CLOSE_TIMEOUT_S` more where the other side does not answer. `shutdown()` may be called at any time, also
    before `run()`, and more than once. A daemon runs once.

    Attributes:
        stats: counters.
        ready: set when the group has given it partitions (perhaps none).
        http_port: where it serves metrics and health; None if it does not.

    Args:
        config: its settings.
        store: keeps the dumps; by default local files at `config.dump_path`.
    """

    def __init__(self, config: ConsumeConfig, *, store: DumpStore | None = None) -> None:
        self._config = config
        self._store = store if store is not None else LocalDumpStore.of(config)
        self.stats = Stats()
        self.ready = asyncio.Event()
        self.http_port: int | None = None
        self._stopping = asyncio.Event()
        self._bound: asyncio.Timeout | None = None
        self._retry = Retry(self._stopping, self.stats)
        self._assembler = Assembler(
            incomplete_after_s=config.incomplete_after_s,
            max_resident_bytes=config.max_resident_bytes,
        )
        self._waiting = Waiting(self._assembler)
        self._gaps = Gaps(config.topics.records, self.stats)
        self._clock = ReadingClock()
        self._closing = Closing()
        self._scratch = Scratch(config.scratch_directory, config.max_scratch_bytes, config.limits)

    @property
    def failing(self) -> dict[str, str]:
        """What fails now and is tried again, such as a write to a full disk, with the problem."""
        return self._retry.failing | self._waiting.failing

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
        watchdog = Watchdog(self._config.stall_after_s, self._retry, asyncio.get_running_loop().time())
        health = Health(self._retry, self._waiting, watchdog)
        async with AsyncExitStack() as stack:
            if self._config.http_port is not None:
                collector = DaemonCollector(
                    self.stats,
                    assembler=self._assembler,
                    scratch=self._scratch,
                    clock=self._clock,
                    watchdog=watchdog,
                    retry=self._retry,
                    waiting=self._waiting,
                    health=health,
                )
                server = serving(self._config.http_host, self._config.http_port, health, registry_of([collector]))
                self.http_port = await stack.enter_async_context(server)
            await self._open_store()
            if await self._retry.unless_stopping(prepare_topics(self._config)):
                await self._run(watchdog, health)

    async def _open_store(self) -> None:
        try:
            await asyncio.to_thread(self._store.open)
        except OSError as exc:
            raise ConsumeConfigError(
                f"dumps cannot be kept at {self._config.dump_path!r}: {folder_trouble(exc, '--dump-path')}"
            ) from exc
        try:
            await asyncio.to_thread(self._scratch.open)
        except OSError as exc:
            raise ConsumeConfigError(
                f"tensors cannot be kept at {self._config.scratch_directory}: {folder_trouble(exc, '--scratch-dir')}"
            ) from exc

    async def _run(self, watchdog: Watchdog, health: Health) -> None:
        decode_pool = ThreadPoolExecutor(1, "rollcast-decode")
        dump_pool = ThreadPoolExecutor(1, "rollcast-dump")
        outputs = Outputs(self._config)
        letters = DeadLetters(
            self._config.topics.records, outputs=outputs, retry=self._retry, stats=self.stats, pool=decode_pool
        )
        intake = Intake(
            self._config,
            assembler=self._assembler,
            scratch=self._scratch,
            clock=self._clock,
            store=self._store,
            outputs=outputs,
            letters=letters,
            retry=self._retry,
            stats=self.stats,
            pool=decode_pool,
        )
        publishing = Publishing(
            self._config,
            assembler=self._assembler,
            intake=intake,
            letters=letters,
            scratch=self._scratch,
            store=self._store,
            outputs=outputs,
            gaps=self._gaps,
            waiting=self._waiting,
            retry=self._retry,
            stats=self.stats,
            pool=dump_pool,
        )
        new_member = partial(
            Member,
            self._config,
            assembler=self._assembler,
            intake=intake,
            letters=letters,
            gaps=self._gaps,
            clock=self._clock,
            retry=self._retry,
            stats=self.stats,
            ready=self.ready,
        )
        try:
            reached = self._retry.until_done("reach Kafka", outputs.start)
            if await self._retry.unless_stopping(reached):
                await self._serve(new_member, publishing, watchdog, health)
        except KafkaError as exc:
            raise ConsumeError(f"Kafka at {self._config.bootstrap_servers} failed for good: {exc!r}") from exc
        finally:
            leaving = [] if health.member is None else [health.member.leave(self._closing)]
            await asyncio.gather(*leaving, self._closing.close({"producer": outputs.stop}))
            await self._closing.give_up()
            decode_pool.shutdown(wait=False, cancel_futures=True)
            dump_pool.shutdown(wait=False, cancel_futures=True)
            _log.info("stopped: %s", self.stats.in_words())

    async def _serve(
        self, new_member: Callable[[], Member], publishing: Publishing, watchdog: Watchdog, health: Health
    ) -> None:
        queue: asyncio.Queue[Rollout | None] = asyncio.Queue(_QUEUED_ROLLOUTS)
        try:
            async with asyncio.timeout(None) as self._bound:
                if self._stopping.is_set():
                    return
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._publish(publishing, queue), name="publish")
                    async with asyncio.TaskGroup() as sources:
                        sources.create_task(self._read(new_member, queue, watchdog, health), name="read")
                        sources.create_task(self._expire(queue), name="expire")
                    await queue.put(None)
                if health.member is not None:
                    await health.member.commit()
        except TimeoutError as exc:
            raise ShutdownTimeoutError(self._config.shutdown_timeout_s) from exc
        except BaseExceptionGroup as group:
            raise _first(group) from group
        finally:
            # `shutdown()` may still be called, and a bound that has ended cannot be moved.
            self._bound = None

    async def _read(
        self,
        new_member: Callable[[], Member],
        queue: asyncio.Queue[Rollout | None],
        watchdog: Watchdog,
        health: Health,
    ) -> None:
        """Reads as a member of the group; one whose client has stalled leaves, and a new one joins."""
        while not self._stopping.is_set():
            member = health.member = new_member()
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(watchdog.watch(member), name="watch")
                    tasks.create_task(member.run(queue.put), name="member")
            except* ClientStalledError as stalled:
                self.stats.client_rebuilds += 1
                _log.error("the Kafka client is replaced: %s", stalled.exceptions[0])
                await member.leave(self._closing)

    async def _expire(self, queue: asyncio.Queue[Rollout | None]) -> None:
        while True:
            await self._retry.pause(min(1.0, self._config.incomplete_after_s / 4))
            if self._stopping.is_set():
                return
            for identity in self._assembler.overdue(self._clock.now):
                # One at a time: handing out thousands at once would hold up the event loop.
                expired = self._assembler.expire_one(identity, self._clock.now)
                if expired is not None:
                    await queue.put(expired.rollout)
                    # Nothing here may refer to it while the next one is waited for: its scratch space would stay taken.
                    del expired
                if self._stopping.is_set():
                    return

    async def _publish(self, publishing: Publishing, queue: asyncio.Queue[Rollout | None]) -> None:
        """Publishes what comes and, in turn with it, what could not be written before."""
        clock = asyncio.get_running_loop().time
        while True:
            # Its scratch space is free only when nothing refers to it, and the next one may be long in coming.
            rollout: Rollout | None = None
            try:
                async with asyncio.timeout(self._waiting.pause_s(clock())):
                    if (rollout := await queue.get()) is None:
                        break
            except TimeoutError:
                pass
            await self._publish_one(publishing, rollout)
            rollout = self._waiting.due(clock())
            await self._publish_one(publishing, rollout)
        if self._waiting.failing:
            left = counted(len(self._waiting.failing), "dump")
            _log.warning("%s that could not be written: left for the next start", left)

    async def _publish_one(self, publishing: Publishing, rollout: Rollout | None) -> None:
        if rollout is None:
            return
        try:
            await publishing.publish(rollout)
        except StoppingError as exc:
            _log.warning("%s is left for the next start: could not %s", rollout.id, exc)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
