"""The shipper's loop: bundle after bundle, until each is acknowledged, then removed."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

from aiokafka.errors import KafkaError, MessageSizeTooLargeError

from rollcast.producer.errors import SpoolError
from rollcast.producer.shipper.config import ShipperConfig
from rollcast.producer.shipper.cut import cut
from rollcast.producer.shipper.delivery import Delivery
from rollcast.producer.shipper.topic import prepare_topic
from rollcast.producer.spool.folder import BundleName, SpoolFolder
from rollcast.producer.spool.read import Bundle, read_bundle
from rollcast.schemas.errors import ContractError
from rollcast.schemas.events import DpShard
from rollcast.schemas.framing import encode
from rollcast.schemas.parts import MIN_PART_BYTES
from rollcast.schemas.topics import record_key

_LOOK_EVERY_S = 0.1
_FIRST_PAUSE_S = 0.2
# The topic's limit is on the batch: its header, the record's header and the key take this much.
_BATCH_OVERHEAD_BYTES = 4 * 1024

_log = logging.getLogger("rollcast.ship")


class Shipper:
    """Empties one spool, which it must own.

    A bundle is removed only after its last record, the shard's closing event, is acknowledged. A bundle that cannot
    be read, or of which no record is small enough for the topic, is set aside and announced as dropped. While Kafka is
    away everything waits, and nothing is lost.
    """

    def __init__(self, spool: SpoolFolder, config: ShipperConfig) -> None:
        self._spool, self._config = spool, config
        self._stopping = asyncio.Event()
        self._part_bytes: dict[Path, int] = {}

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
            bundles = await asyncio.to_thread(self._bundles)
            if not bundles:
                # Looking, not inotify: it must work on every file system that containers share.
                await asyncio.sleep(_LOOK_EVERY_S)
                continue
            try:
                limit = await prepare_topic(self._config)
                async with Delivery(self._config, limit) as delivery:
                    while bundles:
                        if not await self._ship_all(delivery, [path for _, path in bundles], limit):
                            raise OSError("no bundle can be read now")
                        pause_s = _FIRST_PAUSE_S
                        bundles = await asyncio.to_thread(self._bundles)
            except MessageSizeTooLargeError:
                # The bundle is cut smaller next time; the client object is used up.
                continue
            except (KafkaError, OSError) as exc:
                _log.warning(
                    "Kafka at %s does not take records (%s); bundles wait in %s, next try in %.1f s",
                    self._config.bootstrap_servers,
                    str(exc) or type(exc).__name__,
                    self._spool.path,
                    pause_s,
                )
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, self._config.retry_max_s)

    def _bundles(self) -> list[tuple[BundleName, Path]]:
        return self._spool.bundles(self._config.destination)

    def _finished(self) -> bool:
        # The order matters: a trainer that commits its last bundle and leaves must not be missed.
        return self._config.stop_with_trainers and not self._spool.has_trainers() and not self._bundles()

    async def _ship_all(self, delivery: Delivery, paths: list[Path], limit: int) -> int:
        """Returns how many bundles have left the spool; those that cannot be read now stay."""
        left = 0
        for path in paths:
            try:
                await self._ship(delivery, path, limit)
                left += 1
            except OSError as exc:
                _log.warning("bundle %s cannot be read now, the next one goes first: %s", path, exc)
        return left

    async def _ship(self, delivery: Delivery, path: Path, limit: int) -> None:
        part_bytes = self._part_bytes.get(path, min(self._config.max_part_bytes, limit - _BATCH_OVERHEAD_BYTES))
        shard: DpShard | None = None
        try:
            bundle = await asyncio.to_thread(read_bundle, path)
            shard = bundle.shard
            if part_bytes < MIN_PART_BYTES:
                raise SpoolError(
                    f"topic {self._config.topics.records} takes no record of {MIN_PART_BYTES} bytes; "
                    "raise its max.message.bytes and move the bundle back"
                )
            wire_bytes = await self._send(delivery, bundle, part_bytes)
        except MessageSizeTooLargeError:
            self._part_bytes[path] = part_bytes // 2
            _log.warning(
                "topic %s takes no record of %d bytes: cutting smaller", self._config.topics.records, part_bytes
            )
            raise
        except (SpoolError, ContractError) as exc:
            await self._set_aside(delivery, path, shard, str(exc))
            return
        self._part_bytes.pop(path, None)
        await asyncio.to_thread(self._spool.retire, path)
        _log.info("shipped %s/%s: %d bytes on the wire", path.parent.name, path.name, wire_bytes)

    async def _send(self, delivery: Delivery, bundle: Bundle, part_bytes: int) -> int:
        """Sends a bundle, its closing event last; returns the size of all records when all are acknowledged."""
        key = record_key(bundle.shard.run_id, bundle.shard.rollout_id, bundle.shard.stream)
        digests: list[bytes] = []
        part_counts: list[int] = []
        wire_bytes = 0
        slots = cut(bundle, part_bytes)
        while (slot := await asyncio.to_thread(next, slots, None)) is not None:
            for frame in slot.frames:
                await delivery.send(key, frame)
                wire_bytes += len(frame)
            digests.append(slot.digest)
            part_counts.append(len(slot.frames))
        await delivery.acknowledged()
        closing = encode(replace(bundle.shard, slot_digests=tuple(digests), part_counts=tuple(part_counts)))
        await delivery.send(key, closing)
        await delivery.acknowledged()
        return wire_bytes + len(closing)

    async def _set_aside(self, delivery: Delivery, path: Path, shard: DpShard | None, reason: str) -> None:
        if shard is not None:
            key = record_key(shard.run_id, shard.rollout_id, shard.stream)
            await delivery.send(
                key, encode(replace(shard, sample_count=0, dropped_reason=f"set aside: {reason}"[:1000]))
            )
            await delivery.acknowledged()
        self._part_bytes.pop(path, None)
        aside = await asyncio.to_thread(self._spool.set_aside, path, reason)
        _log.error("bundle %s cannot be shipped and was set aside in %s: %s", path.name, aside, reason)
