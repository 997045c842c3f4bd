"""The loop of one spool: bundle after bundle, until each is acknowledged, then removed."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

from aiokafka.errors import KafkaError, MessageSizeTooLargeError

from rollcast.producer.errors import ShipperError, SpoolError, UnusableBundleError
from rollcast.producer.shipper.claims import Claims
from rollcast.producer.shipper.config import ShipperConfig
from rollcast.producer.shipper.cut import cut
from rollcast.producer.shipper.delivery import BundleDelivery, Delivery
from rollcast.producer.shipper.opening import Opening
from rollcast.producer.shipper.refusal import refusal_of
from rollcast.producer.shipper.stats import ShipperStats
from rollcast.producer.shipper.topic import RecordsTopic, part_limit
from rollcast.producer.shipper.turns import Turns
from rollcast.producer.spool.folder import SpoolFolder, is_folder
from rollcast.producer.spool.read import Bundle
from rollcast.schemas.errors import ContractError
from rollcast.schemas.events import DpShard
from rollcast.schemas.framing import encode
from rollcast.schemas.parts import MIN_PART_BYTES
from rollcast.schemas.topics import record_key

_LOOK_EVERY_S = 0.1
_FIRST_PAUSE_S = 0.2
_TELL_EVERY_S = 60.0

_log = logging.getLogger("rollcast.ship")


@dataclass(slots=True)
class _Shipment:
    """A bundle on its way.

    Attributes:
        path: of the bundle.
        part_bytes: largest part it is cut to.
        delivery: of its records.
        closing: its closing event, for when all parts are acknowledged.
        wire_bytes: size of its records so far.
    """

    path: Path
    part_bytes: int
    delivery: BundleDelivery
    closing: DpShard | None = None
    wire_bytes: int = 0

    async def send(self, frame: bytes, shard: DpShard) -> None:
        await self.delivery.send(record_key(shard.run_id, shard.rollout_id, shard.stream), frame)
        self.wire_bytes += len(frame)


class Shipper:
    """Empties one spool, which the caller must own.

    Bundles are sent one after the other, in rollout order, and acknowledged while the next ones are sent. A bundle is
    removed only after its last record, the shard's closing event, is acknowledged. A bundle that cannot be read, or of
    which no record is small enough for the topic, is set aside and announced as dropped. While Kafka is away everything
    waits, and nothing is lost.

    Attributes:
        stats: what was done so far.
    """

    def __init__(
        self, spool: SpoolFolder, config: ShipperConfig, topic: RecordsTopic, threads: Executor, turns: Turns
    ) -> None:
        self.stats = ShipperStats()
        self._spool, self._config, self._topic, self._threads, self._turns = spool, config, topic, threads, turns
        self._part_bytes: dict[Path, int] = {}
        self._tries: Counter[Path] = Counter()
        self._troubles: Counter[Path] = Counter()
        self._claims = Claims()
        turns.join(spool.path)

    async def run(self) -> None:
        """Ships until cancelled, or until the spool is empty and no trainer uses it if so configured.

        Raises:
            ShipperRefusedError: Kafka has never let this process in and refuses it; or refuses it now, while trainers
                are there to start another one with their settings.
        """
        await asyncio.to_thread(self._spool.sweep_leaving)
        pause_s, told, tell_again_at = _FIRST_PAUSE_S, "", 0.0
        while True:
            is_empty = False
            try:
                paths = await asyncio.to_thread(self._waiting_or_none)
                if paths is None:
                    return
                is_empty = not paths
                if paths:
                    await self._connect_and_ship(paths)
                    pause_s = _FIRST_PAUSE_S
                    continue
                if not self._topic.is_found:
                    await self._topic.prepare()
                self.stats.progressed()
                # Looking, not inotify: it must work on every file system that containers share.
                await asyncio.sleep(_LOOK_EVERY_S)
                continue
            except (KafkaError, ShipperError, ContractError) as exc:
                self.stats.kafka_errors += 1
                refusal = refusal_of(exc, self._config)
                if refusal is not None and await asyncio.to_thread(self._should_go):
                    raise refusal from None
                address, words = self._config.bootstrap_servers, str(refusal or exc) or type(exc).__name__
                trouble = f"Kafka at {address} does not take records ({words})"
            except OSError as exc:
                refusal, trouble = None, f"the spool cannot be read ({exc})"
            finally:
                self._turns.end(self._spool.path)
            held = "no bundle waits" if is_empty else "bundles wait"
            is_news = self.stats.trouble != trouble or held != told
            is_steady = is_empty or refusal is not None or pause_s == self._config.retry_max_s
            if is_news or not is_steady or time.monotonic() >= tell_again_at:
                _log.warning("%s; %s in %s, next try in %.1f s", trouble, held, self._spool.path, pause_s)
                told, tell_again_at = held, time.monotonic() + _TELL_EVERY_S
            self.stats.trouble, self.stats.is_refused = trouble, refusal is not None
            await self._pause(pause_s)
            pause_s = min(2 * pause_s, self._config.retry_max_s)

    def _waiting(self) -> list[Path]:
        """Returns the bundles in rollout order; those that made trouble come last, so that they block nobody."""
        paths = [path for _, path in self._spool.bundles(self._config.destination)]
        return sorted(paths, key=lambda path: self._troubles[path] + self._claims.suspicion(path))

    def _waiting_or_none(self) -> list[Path] | None:
        """Returns the bundles as `_waiting`, None where none will come any more."""
        # One call for another thread: a shipper that only looks should take next to nothing from training.
        paths = self._waiting()
        return None if not paths and self._finished() else paths

    def _finished(self) -> bool:
        # The order matters: a trainer that commits its last bundle and leaves must not be missed.
        return self._config.stop_with_trainers and not self._has_trainers() and not self._waiting()

    def _is_certainly_finished(self) -> bool:
        try:
            return self._finished()
        except OSError:
            # A spool that cannot be read is why it pauses; the next try tells.
            return False

    def _has_trainers(self) -> bool:
        try:
            return self._spool.has_trainers()
        except OSError:
            # Where the folder itself was removed nobody is left; else something waits, or will soon.
            return is_folder(self._spool.path)

    async def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not await asyncio.to_thread(self._is_certainly_finished):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            await asyncio.sleep(min(left_s, _LOOK_EVERY_S))

    def _should_go(self) -> bool:
        """Tells, of a refused shipper, whether its settings are to blame, or trainers have others."""
        return not self._topic.is_found or (self._config.is_started_by_trainer and self._has_trainers())

    async def _connect_and_ship(self, paths: list[Path]) -> None:
        """Ships bundles for as long as some are there; returns early where one must be cut smaller."""
        limit = await self._topic.prepare()
        shipments: list[_Shipment] = []
        try:
            async with Delivery(self._config, limit, self.stats) as delivery:
                while paths:
                    before = self.stats.bundles
                    await self._ship_all(delivery, paths, part_limit(self._config, limit), shipments)
                    if self.stats.bundles == before:
                        raise OSError("none of its bundles can be had, read or removed now")
                    paths = await asyncio.to_thread(self._waiting)
        except KafkaError:
            # Their own errors, noted even where another bundle's ended the client: each decides for its bundle alone.
            refused = [(shipment, shipment.delivery.error) for shipment in shipments]
            too_large = [shipment for shipment, error in refused if isinstance(error, MessageSizeTooLargeError)]
            for shipment in too_large:
                _log.warning("%s has a part too large for the topic: cutting smaller", shipment.path)
                self._part_bytes[shipment.path] = shipment.part_bytes // 2
            self._troubles.update(
                shipment.path for shipment, error in refused if error and not getattr(error, "retriable", False)
            )
            if not too_large:
                raise

    async def _ship_all(
        self, delivery: Delivery, paths: list[Path], part_bytes: int, shipments: list[_Shipment]
    ) -> None:
        """Ships these bundles; those that cannot be read now stay.

        `shipments` has those on their way, also when this raises.
        """
        closing: set[asyncio.Task[None]] = set()
        opening = Opening(self._claims)
        try:
            for path, following in zip(paths, [*paths[1:], None], strict=True):
                deaths = opening.deaths(path)
                most_open = 1 if deaths else self._config.max_open_bundles
                while len(closing) >= most_open:
                    closing = await _one_done(closing)
                if not opening.is_ahead(path):
                    await self._turns.take(self._spool.path, deaths)
                ahead = None if self._turns.are_asked_for else following
                shipment = _Shipment(
                    path, min(part_bytes, self._part_bytes.get(path, part_bytes)), BundleDelivery(delivery)
                )
                shipments.append(shipment)
                if await self._send_parts(shipment, opening.open(path, ahead)):
                    closing.add(asyncio.create_task(self._close(shipment, shipments), name=f"close-{path.name}"))
                else:
                    shipments.remove(shipment)
                    self._claims.give_back(path)
                while len(closing) >= most_open:
                    closing = await _one_done(closing)
            while closing:
                closing = await _one_done(closing)
        finally:
            try:
                for task in closing:
                    task.cancel()
                await asyncio.gather(*closing, return_exceptions=True)
                await opening.end()
            finally:
                # Also when this is cancelled again: what stays claimed looks as if its shipper had died.
                self._claims.give_all_back()
                self._turns.end(self._spool.path)

    async def _send_parts(self, shipment: _Shipment, opened: Awaitable[Bundle | None]) -> bool:
        """Sends all of a bundle but its closing event; returns whether that is to follow."""
        path, shard = shipment.path, None
        digests: list[bytes] = []
        part_counts: list[int] = []
        try:
            bundle = await opened
            if bundle is None:
                return False
            shard = bundle.shard
            if shipment.part_bytes < MIN_PART_BYTES:
                raise SpoolError(
                    f"topic {self._config.topics.records} takes no record of {MIN_PART_BYTES} bytes; "
                    "raise its max.message.bytes and move the bundle back"
                )
            self.stats.resent_bundles += self._tries[path] > 0
            self._tries[path] += 1
            slots = cut(bundle, shipment.part_bytes, self._threads, self._config.max_ahead_bytes)
            async with aclosing(slots):
                async for slot in slots:
                    for frame in slot.frames:
                        await shipment.send(frame, shard)
                    digests.append(slot.digest)
                    part_counts.append(len(slot.frames))
        except UnusableBundleError as exc:
            await self._set_aside(shipment, exc.shard, str(exc))
            return False
        except (SpoolError, ContractError) as exc:
            await self._set_aside(shipment, shard, str(exc))
            return False
        except (OSError, MemoryError) as exc:
            # Memory that is short now would else end every shipper, and unlike a death that leaves no mark.
            _log.warning("bundle %s cannot be read now, the next one goes first: %r", path, exc)
            return False
        # Its records may wait for Kafka for long.
        await asyncio.to_thread(self._claims.survived, path)
        shipment.closing = replace(shard, slot_digests=tuple(digests), part_counts=tuple(part_counts))
        return True

    async def _close(self, shipment: _Shipment, shipments: list[_Shipment]) -> None:
        """Sends a bundle's closing event when all its parts are acknowledged; removes it when that is, too."""
        assert shipment.closing is not None  # noqa: S101  # its parts were sent
        await shipment.delivery.acknowledged()
        await shipment.send(encode(shipment.closing), shipment.closing)
        await shipment.delivery.acknowledged()
        path = shipment.path
        shipments.remove(shipment)
        try:
            await asyncio.to_thread(self._spool.retire, path)
        except OSError as exc:
            self._troubles[path] += 1
            _log.warning("bundle %s is delivered and cannot be removed now, so it will be sent again: %s", path, exc)
            return
        self._forget(path)
        is_mark = shipment.closing.dropped_reason is not None
        self.stats.shipped_marks += is_mark
        self.stats.shipped_bundles += not is_mark
        self.stats.shipped_bytes += shipment.closing.raw_bytes
        _log.info("shipped %s/%s: %d bytes on the wire", path.parent.name, path.name, shipment.wire_bytes)

    async def _set_aside(self, shipment: _Shipment, shard: DpShard | None, reason: str) -> None:
        if shard is not None:
            dropped = replace(shard, sample_count=0, dropped_reason=f"set aside: {reason}"[:1000])
            await shipment.send(encode(dropped), dropped)
            await shipment.delivery.acknowledged()
        path = shipment.path
        try:
            aside = await asyncio.to_thread(self._spool.set_aside, path, reason)
        except OSError as exc:
            self._troubles[path] += 1
            _log.warning("bundle %s cannot be shipped (%s) nor set aside now: %s", path, reason, exc)
            return
        self._claims.clear_deaths(path)
        self._forget(path)
        self.stats.set_aside_bundles += 1
        _log.error("bundle %s cannot be shipped and was set aside in %s: %s", path, aside, reason)

    def _forget(self, path: Path) -> None:
        self._claims.give_back(path)
        self._part_bytes.pop(path, None)
        del self._tries[path], self._troubles[path]


async def _one_done(tasks: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Returns the tasks that still run after one has ended.

    Raises:
        Exception: of a task that failed.
    """
    done, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    return running
