"""A daemon that is told to stop does so within its bound, whatever it is at and whatever became of its broker."""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from fixtures.frames import frames_of
from fixtures.installation import Installation, installation, keyed, running, shards, until
from fixtures.proxy import StallingProxy, proxy_to, send_the_daemon_through
from rollcast.consumer import Daemon, LocalDumpStore
from rollcast.consumer.broker import Broker, JvmBroker
from rollcast.consumer.closing import CLOSE_TIMEOUT_S
from rollcast.consumer.errors import ShutdownTimeoutError
from rollcast.consumer.rollout import RolloutKey
from rollcast.consumer.store import Dump, PublishedDump

SHUTDOWN_TIMEOUT_S = 3.0
BOUND_S = SHUTDOWN_TIMEOUT_S + CLOSE_TIMEOUT_S + 2.0
"""Room for a busy machine included."""


class PhaseStore(LocalDumpStore):
    """A store that stops in a chosen method until it is released, or says that the disk is full.

    Attributes:
        entered: set when it has stopped there.
    """

    def __init__(self, template: str, stops_in: str) -> None:
        super().__init__(template)
        self._stops_in = stops_in
        self.entered, self.released = threading.Event(), threading.Event()

    def published(self, key: RolloutKey) -> PublishedDump | None:
        self._stop("published")
        return super().published(key)

    def publish(self, dump: Dump) -> PublishedDump:
        self._stop("publish")
        if self._stops_in == "disk full":
            self.entered.set()
            raise OSError(28, "No space left on device")
        return super().publish(dump)

    def _stop(self, method: str) -> None:
        if self._stops_in == method:
            self.entered.set()
            self.released.wait()


PHASES = ("idle", "collecting", "published", "publish", "announce", "disk full")
"""What the daemons are at; `published` and `publish` are the store's methods."""


@dataclass(kw_only=True)
class Subject:
    """A daemon that has reached a phase."""

    phase: str
    daemon: Daemon
    store: PhaseStore
    task: asyncio.Task[None]
    folder: Path

    async def stop(self) -> tuple[float, bool]:
        """Returns how many seconds it took, and whether everything was brought to its end."""
        started = time.monotonic()
        self.daemon.shutdown()
        try:
            await self.task
        except ShutdownTimeoutError:
            return time.monotonic() - started, False
        return time.monotonic() - started, True


async def subject(bootstrap_servers: str, folder: Path, phase: str) -> Subject:
    made = installation(bootstrap_servers, folder / phase)
    store = PhaseStore(made.config.dump_path, "publish" if phase == "announce" else phase)
    daemon = Daemon(replace(made.config, shutdown_timeout_s=SHUTDOWN_TIMEOUT_S), store=store)
    task = asyncio.create_task(daemon.run())
    await daemon.ready.wait()
    frames = keyed("run", 1, frames_of("run", 1, 1, shards(1)))
    if phase == "collecting":
        await made.send(frames[:-1])
        await until(lambda: daemon.stats.records == len(frames) - 1)
    elif phase != "idle":
        await made.send(frames)
        assert await asyncio.to_thread(store.entered.wait, 30)
    return Subject(phase=phase, daemon=daemon, store=store, task=task, folder=made.folder)


async def nothing(_proxy: StallingProxy) -> None:
    """Leaves the broker as it is."""


async def gone(proxy: StallingProxy) -> None:
    """Closes every connection and refuses new ones."""
    await proxy.stop()


async def silent(proxy: StallingProxy) -> None:
    """Answers nobody any more, and closes nothing."""
    proxy.stall(also_new=True)


@pytest.mark.parametrize("happens", [nothing, gone, silent])
async def test_a_daemon_stops_within_its_bound_in_every_phase(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happens: Callable[[StallingProxy], Awaitable[None]]
) -> None:
    async with proxy_to(broker.bootstrap_servers) as proxy:
        send_the_daemon_through(proxy, monkeypatch)
        subjects = await asyncio.gather(*(subject(broker.bootstrap_servers, tmp_path, phase) for phase in PHASES))
        try:
            await happens(proxy)
            (announcing,) = (each for each in subjects if each.phase == "announce")
            announcing.store.released.set()
            await until(lambda: (announcing.folder / "run" / "1.pt.manifest.json").exists())
            stopped = await asyncio.gather(*(each.stop() for each in subjects))
        finally:
            for each in subjects:
                each.store.released.set()

    outcomes = dict(zip(PHASES, stopped, strict=True))
    assert max(seconds for seconds, _ in stopped) < BOUND_S, outcomes
    if happens is nothing:
        abandoned = {phase for phase, (_, in_order) in outcomes.items() if not in_order}
        assert abandoned == {"published", "publish"}, "only a thread that hangs stands in the way"


async def test_a_daemon_stops_within_its_bound_while_a_broker_that_says_nothing_is_asked_for_topics(
    broker: Broker, tmp_path: Path
) -> None:
    async with proxy_to(broker.bootstrap_servers) as proxy:
        proxy.stall(also_new=True)
        daemon = Daemon(installation(f"127.0.0.1:{proxy.port}", tmp_path).config)
        task = asyncio.create_task(daemon.run())
        await until(lambda: proxy.connections > 0)
        daemon.shutdown()
        async with asyncio.timeout(BOUND_S):
            await task


async def test_a_daemon_stops_within_its_bound_while_the_group_makes_it_wait(
    installed: Installation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rollcast.consumer")
    async with proxy_to(installed.config.bootstrap_servers) as proxy:
        with monkeypatch.context() as patch:
            send_the_daemon_through(proxy, patch)
            holder = asyncio.create_task((silenced := Daemon(installed.config)).run())
            await silenced.ready.wait()
            # The group now waits for this member's answer until its session has run out.
            proxy.stall(also_new=True)
        daemon = Daemon(installed.config)
        task = asyncio.create_task(daemon.run())
        await until(lambda: "joining group" in caplog.text.partition("assigned partitions")[2])
        daemon.shutdown()
        async with asyncio.timeout(BOUND_S):
            await task
        assert not daemon.ready.is_set()
        silenced.shutdown()
        await holder


async def test_shutdown_while_the_disk_is_full_leaves_the_rollout_for_the_next_start(installed: Installation) -> None:
    async with running(installed.config, PhaseStore(installed.config.dump_path, "disk full")) as daemon:
        await installed.send(keyed("run", 1, frames_of("run", 1, 1, shards(1))))
        await until(lambda: daemon.stats.retries >= 1)

    async with running(installed.config):
        await installed.dumps(1)
    installed.check("run", 1, shards(1))


@pytest.mark.parametrize("away_s", [0.5, 2.5])
async def test_shutdown_while_the_broker_is_away_is_graceful(
    own_broker: JvmBroker, tmp_path: Path, away_s: float
) -> None:
    daemon = Daemon(installation(own_broker.bootstrap_servers, tmp_path).config)
    task = asyncio.create_task(daemon.run())
    await daemon.ready.wait()
    await asyncio.to_thread(own_broker.kill)
    # The client's reaction to the loss is what may stand in the way; it has no event to wait for.
    await asyncio.sleep(away_s)
    daemon.shutdown()
    async with asyncio.timeout(40):
        await task


async def test_shutdown_before_the_start_ends_the_run_at_once(tmp_path: Path) -> None:
    daemon = Daemon(installation("127.0.0.1:1", tmp_path).config)
    daemon.shutdown()
    daemon.shutdown()

    async with asyncio.timeout(5):
        await daemon.run()
