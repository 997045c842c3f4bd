"""The shipper's loop: bundle after bundle, until each is acknowledged, then removed."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError, TopicAlreadyExistsError, for_code

from rollcast.producer.errors import SpoolError
from rollcast.producer.shipper.config import ShipperConfig
from rollcast.producer.shipper.cut import cut
from rollcast.producer.shipper.delivery import Delivery
from rollcast.producer.spool.folder import SpoolFolder
from rollcast.producer.spool.read import read_bundle
from rollcast.schemas.errors import ContractError
from rollcast.schemas.framing import encode
from rollcast.schemas.topics import record_key

_LOOK_EVERY_S = 0.1
_FIRST_PAUSE_S = 0.2

_log = logging.getLogger("rollcast.ship")


class Shipper:
    """Empties one spool, which it must own.

    A bundle is removed only after its last record, the shard's closing event, is acknowledged. A bundle that cannot
    be read is set aside. While Kafka is away everything waits, and nothing is lost.
    """

    def __init__(self, spool: SpoolFolder, config: ShipperConfig) -> None:
        self._spool, self._config = spool, config
        self._stopping = asyncio.Event()

    def shutdown(self) -> None:
        """Makes `run` return soon; what is not acknowledged by then stays in the spool."""
        self._stopping.set()

    async def run(self) -> None:
        """Ships until `shutdown`, or until the spool is empty and no trainer uses it if so configured."""
        await asyncio.to_thread(self._spool.sweep_leaving)
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
        pause_s = _FIRST_PAUSE_S
        while not self._finished():
            if not await asyncio.to_thread(self._spool.bundles):
                # Looking, not inotify: it must work on every file system that containers share.
                await asyncio.sleep(_LOOK_EVERY_S)
                continue
            try:
                await self._ensure_topic()
                async with Delivery(self._config) as delivery:
                    while bundles := await asyncio.to_thread(self._spool.bundles):
                        await self._ship(delivery, bundles[0][1])
                        pause_s = _FIRST_PAUSE_S
            except KafkaError as exc:
                _log.warning(
                    "Kafka at %s does not take records (%s); bundles wait in %s, next try in %.1f s",
                    self._config.bootstrap_servers,
                    str(exc) or type(exc).__name__,
                    self._spool.path,
                    pause_s,
                )
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, self._config.retry_max_s)

    def _finished(self) -> bool:
        # The order matters: a trainer that commits its last bundle and leaves must not be missed.
        return self._config.stop_with_trainers and not self._spool.has_trainers() and not self._spool.bundles()

    async def _ensure_topic(self) -> None:
        topics = self._config.topics
        admin = AIOKafkaAdminClient(bootstrap_servers=self._config.bootstrap_servers, client_id="rollcast-ship")
        try:
            await admin.start()
            if topics.records in await admin.list_topics():
                return
            topic = NewTopic(
                name=topics.records,
                num_partitions=self._config.partitions,
                replication_factor=self._config.replication_factor,
                topic_configs=topics.settings()[topics.records],
            )
            response: Any = await admin.create_topics([topic])
            for name, code, *message in response.topic_errors:
                # The consumer may have been quicker.
                if code and for_code(code) is not TopicAlreadyExistsError:
                    raise for_code(code)(f"topic {name} could not be created: {message}")
        finally:
            await admin.close()

    async def _ship(self, delivery: Delivery, path: Path) -> None:
        try:
            bundle = await asyncio.to_thread(read_bundle, path)
            key = record_key(bundle.shard.run_id, bundle.shard.rollout_id, bundle.shard.stream)
            digests: list[bytes] = []
            part_counts: list[int] = []
            wire_bytes = 0
            slots = cut(bundle, self._config.max_part_bytes)
            while (slot := await asyncio.to_thread(next, slots, None)) is not None:
                for frame in slot.frames:
                    await delivery.send(key, frame)
                    wire_bytes += len(frame)
                digests.append(slot.digest)
                part_counts.append(len(slot.frames))
            await delivery.acknowledged()
            shard = replace(bundle.shard, slot_digests=tuple(digests), part_counts=tuple(part_counts))
            await delivery.send(key, encode(shard))
            await delivery.acknowledged()
        except (SpoolError, ContractError) as exc:
            aside = self._spool.set_aside(path, str(exc))
            _log.error("bundle %s cannot be shipped and was set aside in %s: %s", path.name, aside, exc)
            return
        await asyncio.to_thread(self._spool.retire, path)
        _log.info("shipped %s/%s: %d bytes on the wire", path.parent.name, path.name, wire_bytes)
