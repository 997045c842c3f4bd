"""One process over one or several spools."""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO

from aiokafka.errors import KafkaError

from rollcast.producer.shipper.config import ShipperConfig
from rollcast.producer.shipper.metrics import MetricsEndpoint
from rollcast.producer.shipper.shipper import Shipper
from rollcast.producer.shipper.topic import RecordsTopic
from rollcast.producer.spool.folder import SpoolFolder

_log = logging.getLogger("rollcast.ship")


class Sidecar:
    """Ships several spools side by side.

    Args:
        config: of the shippers.
        spools: each with the lock that makes this process its shipper; closed when that spool is done with.
    """

    def __init__(self, config: ShipperConfig, spools: Sequence[tuple[SpoolFolder, IO[bytes]]]) -> None:
        self._config, self._spools = config, spools
        self._stopping = asyncio.Event()

    def shutdown(self) -> None:
        """Makes `run` return soon; what is not acknowledged by then stays in its spool. May come before `run`."""
        self._stopping.set()

    async def run(self) -> None:
        """Ships until `shutdown`, or until no spool has bundles or trainers any more if so configured.

        Raises:
            ShipperError: Kafka refuses us, or the topic is missing, found when it first answers.
        """
        work = asyncio.create_task(self._work(), name="ship")
        stop = asyncio.create_task(self._stopping.wait(), name="wait-for-shutdown")
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            work.cancel()
            results = await asyncio.gather(work, stop, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]

    async def _work(self) -> None:
        topic = RecordsTopic(self._config)
        with ThreadPoolExecutor(self._config.compress_threads, thread_name_prefix="rollcast-cut") as threads:
            shippers = [(spool, lock, Shipper(spool, self._config, topic, threads)) for spool, lock in self._spools]
            with MetricsEndpoint(self._config.metrics_port, [(spool, shipper.stats) for spool, _, shipper in shippers]):
                try:
                    await topic.prepare()
                except (KafkaError, OSError) as exc:
                    address = self._config.bootstrap_servers
                    _log.warning("Kafka at %s does not answer yet (%s); bundles wait", address, exc)
                # Not a TaskGroup: a shipper ends only when it is done, or by a mistake of ours that should end all.
                await asyncio.gather(*(_ship(shipper, lock) for _, lock, shipper in shippers))


async def _ship(shipper: Shipper, lock: IO[bytes]) -> None:
    # Given back at once: a trainer that comes later looks for a shipper.
    with lock:
        await shipper.run()
