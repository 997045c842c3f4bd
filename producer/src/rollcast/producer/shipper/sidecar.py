"""One process over one or several spools."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Coroutine, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from aiokafka.errors import KafkaError

from rollcast.producer.errors import ShipperError, SpoolError
from rollcast.producer.shipper.config import ShipperConfig
from rollcast.producer.shipper.health import Health
from rollcast.producer.shipper.http_server import serving
from rollcast.producer.shipper.metrics import registry_of
from rollcast.producer.shipper.shipper import Shipper
from rollcast.producer.shipper.stats import ShipperStats
from rollcast.producer.shipper.summary import Summary
from rollcast.producer.shipper.topic import RecordsTopic
from rollcast.producer.shipper.turns import Turns
from rollcast.producer.spool.folder import SpoolFolder, is_folder

_OWN_TRIES = 5
_OWN_PAUSE_S = 0.1
_LOOK_EVERY_S = 1.0
_NAMES_SHOWN = 3
# Longer than a client takes to close.
_CANCEL_AGAIN_S = 6.0

_log = logging.getLogger("rollcast.ship")


class Sidecar:
    """Ships several spools side by side. One that is not there yet is waited for; one that has a shipper is left to it.

    Attributes:
        found: set when Kafka has let this process in, and has the topic.

    Args:
        config: of the shippers.
        folders: the spools.
    """

    def __init__(self, config: ShipperConfig, folders: Sequence[Path]) -> None:
        self._config, self._folders = config, folders
        self._topic, self._turns = RecordsTopic(config), Turns()
        self.found = self._topic.found
        self._shipping: list[tuple[SpoolFolder, ShipperStats]] = []
        self._awaited: dict[Path, str] = {}
        self._stopping = asyncio.Event()

    def shutdown(self) -> None:
        """Makes `run` return soon; what is not acknowledged by then stays in its spool. May come before `run`."""
        self._stopping.set()

    async def run(self) -> None:
        """Ships until `shutdown`, or until no spool has bundles or trainers any more if so configured.

        Raises:
            ShipperRefusedError: Kafka refuses us, or the topic is missing, found when it first answers.
            ShipperError: a spool or the address for metrics cannot be used.
        """
        work = asyncio.create_task(self._work(), name="ship")
        stop = asyncio.create_task(self._stopping.wait(), name="wait-for-shutdown")
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            # Again and again: a client that swallows a cancellation must not keep the process.
            while not work.done():
                work.cancel()
                await asyncio.wait({work}, timeout=_CANCEL_AGAIN_S)
        if not work.cancelled() and (error := work.exception()) is not None:
            raise error

    async def _work(self) -> None:
        config = self._config
        with ExitStack() as stack:
            owned: dict[Path, tuple[SpoolFolder, IO[bytes]] | None] = {}
            for folder in dict.fromkeys(self._folders):
                if self._is_there(folder):
                    if (own := await self._own(folder)) is not None:
                        owned[folder] = own
                        _tell_if_unused(own[0])
                        stack.enter_context(own[1])
                else:
                    self._awaited[folder] = f"spool {folder} is not there yet"
                    _log.warning("%s; it is waited for", self._awaited[folder])
                    owned[folder] = None
            if not owned:
                return
            _log.info(
                "rollcast %s ships %s to topic %s at %s",
                version("rollcast"),
                ", ".join(str(folder) for folder in owned),
                config.topics.records,
                config.bootstrap_servers,
            )
            threads = stack.enter_context(ThreadPoolExecutor(config.compress_threads, "rollcast-cut"))
            health = Health(self._topic, self._shipping, self._awaited, asyncio.get_running_loop())
            registry = registry_of(list(owned), self._shipping)
            stack.enter_context(serving(config.metrics_host, config.metrics_port, health, registry))
            try:
                await self._topic.prepare()
            except (KafkaError, OSError) as exc:
                _log.warning("Kafka at %s does not answer yet (%s); bundles wait", config.bootstrap_servers, exc)
            work = [self._ship(folder, own, threads) for folder, own in owned.items()]
            if None in owned.values():
                work.append(self._reach_kafka())
            with Summary(self._shipping):
                await _all(work)
            _log.info("no spool has bundles or trainers any more")

    def _is_there(self, folder: Path) -> bool:
        """Tells whether a folder is there; one that nobody will make while this process runs must be."""
        if is_folder(folder):
            return True
        if os.path.lexists(folder) or self._config.stop_with_trainers:
            raise ShipperError(f"spool {folder} is no folder; give the spool_dir of the publisher")
        # Not Path.exists, which raises where a folder above may not be looked into.
        above = next(path for path in folder.absolute().parents if os.path.exists(path))  # noqa: PTH110
        if not is_folder(above):
            raise ShipperError(f"spool {folder} cannot be: {above} is no folder; give the spool_dir of the publisher")
        return False

    async def _own(self, folder: Path) -> tuple[SpoolFolder, IO[bytes]] | None:
        spool = SpoolFolder(folder)
        # A writer that looks for a shipper holds the lock for an instant; that must not pass for one.
        for _ in range(_OWN_TRIES):
            if (lock := spool.try_own(self._config.destination)) is not None:
                return spool, lock
            await asyncio.sleep(_OWN_PAUSE_S)
        _log.warning("spool %s already has a shipper", folder)
        return None

    async def _ship(self, folder: Path, own: tuple[SpoolFolder, IO[bytes]] | None, threads: Executor) -> None:
        spool, lock = own or await self._await_spool(folder)
        # Given back at once: a trainer that comes later looks for a shipper.
        with lock:
            shipper = Shipper(spool, self._config, self._topic, threads, self._turns)
            self._shipping.append((spool, shipper.stats))
            await shipper.run()

    async def _reach_kafka(self) -> None:
        """Asks Kafka until it has let this process in; shippers do so too, but there is none before a spool comes."""
        while not self._topic.is_found:
            await asyncio.sleep(self._config.retry_max_s)
            with contextlib.suppress(KafkaError, OSError):
                await self._topic.prepare()

    async def _await_spool(self, folder: Path) -> tuple[SpoolFolder, IO[bytes]]:
        # Looking, not inotify: it must work on every file system that containers share.
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            if not await asyncio.to_thread(is_folder, folder):
                continue
            try:
                spool = SpoolFolder(folder)
                if (lock := spool.try_own(self._config.destination)) is not None:
                    _log.info("spool %s is there", folder)
                    del self._awaited[folder]
                    return spool, lock
                trouble = f"spool {folder} has another shipper"
            except (SpoolError, OSError) as exc:
                trouble = str(exc)
            if trouble != self._awaited[folder]:
                self._awaited[folder] = trouble
                _log.warning("%s; it is tried again", trouble)


def _tell_if_unused(spool: SpoolFolder) -> None:
    """Says of a folder without anything of a publisher that one is waited for: its name may be a mistyped one."""
    if spool.is_used():
        return
    if names := spool.foreign_names():
        shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
        _log.warning(
            "spool %s holds %s, and nothing of a publisher yet; one is waited for: check that this is its spool_dir",
            spool.path,
            shown,
        )
    else:
        _log.info("spool %s is empty; a publisher is waited for", spool.path)


async def _all(shipping: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Returns when all have ended; what one raises, and no group of it, ends the others."""
    tasks = [asyncio.create_task(each, name="ship-spool") for each in shipping]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
