"""One Kafka producer, and what it still owes an acknowledgement for."""

import asyncio
import contextlib
import time
from types import TracebackType
from typing import Any, Self

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaConnectionError, KafkaError, KafkaTimeoutError

from rollcast.producer.shipper.cancellation import pass_on_cancellation
from rollcast.producer.shipper.config import ShipperConfig
from rollcast.producer.shipper.stats import ShipperStats
from rollcast.schemas.sizes import counted

_REQUEST_ROOM_BYTES = 64 * 1024
_CLOSE_TIMEOUT_S = 5.0
_CANCEL_AGAIN_S = 0.1


class DeliveryBrokenError(KafkaError):  # type: ignore[misc]  # aiokafka ships no types
    """Another record of the same client failed, so that its client is used up."""


class Delivery:
    """Sends records with acks=all and idempotence, at most so many bytes unacknowledged.

    After any error the object is used up: close it, make a new one, and send everything unacknowledged again.

    Args:
        config: of the shipper.
        max_batch_bytes: the topic's limit, which is on whole batches.
        stats: what to count in.
    """

    def __init__(self, config: ShipperConfig, max_batch_bytes: int, stats: ShipperStats) -> None:
        self._config, self._stats = config, stats
        # aiokafka never gives a batch of an idempotent producer up, so the deadline is kept here.
        self.timeout_s = config.delivery_timeout_ms / 1000
        self._producer: Any = AIOKafkaProducer(
            bootstrap_servers=config.bootstrap_servers,
            client_id="rollcast-ship",
            acks="all",
            enable_idempotence=True,
            # The parts are compressed already, so what the client counts is what the broker counts.
            compression_type=None,
            max_request_size=config.max_part_bytes + _REQUEST_ROOM_BYTES,
            max_batch_size=min(max_batch_bytes, config.max_part_bytes + _REQUEST_ROOM_BYTES // 2),
            request_timeout_ms=min(config.request_timeout_ms, config.delivery_timeout_ms),
            linger_ms=2,
            **config.security.client_options(),
        )
        self._in_flight_bytes = 0
        self._pending: set[asyncio.Future[object]] = set()
        self._settled = asyncio.Event()
        self._error: BaseException | None = None

    async def __aenter__(self) -> Self:
        """Connects.

        Raises:
            KafkaError: no broker answers, or not in time.
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._producer.start()
        except BaseException as exc:
            await self._give_up()
            if isinstance(exc, OSError):
                raise KafkaConnectionError(str(exc) or "no answer") from exc
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes within a bound; what is unacknowledged then is nobody's any more."""
        if error is None and self._error is None and not self._pending:
            with contextlib.suppress(TimeoutError, KafkaError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await self._producer.stop()
                pass_on_cancellation()
                return
        await self._give_up()

    async def _give_up(self) -> None:
        """Closes without sending anything more; `stop()` would wait for a broker that may never answer."""
        for future in self._pending:
            future.cancel()
        self._pending.clear()
        client, sender = self._producer.client, self._producer._sender.sender_task
        self._producer._closed = True
        with contextlib.suppress(TimeoutError, KafkaError, OSError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                # The sender waits for its requests when it is cancelled, and those for metadata that will not come.
                while sender is not None and not sender.done():
                    sender.cancel()
                    await asyncio.wait({sender}, timeout=_CANCEL_AGAIN_S)
                await client.close()
        pass_on_cancellation()

    async def send(self, key: bytes, value: bytes) -> asyncio.Future[object]:
        """Hands a record over; waits while too much is unacknowledged.

        Raises:
            KafkaError: this or an earlier record was refused or not acknowledged in time.
        """
        try:
            async with asyncio.timeout(self.timeout_s) as timeout:
                while self._pending and self._in_flight_bytes + len(value) > self._config.max_in_flight_bytes:
                    await self.settled()
                    timeout.reschedule(asyncio.get_running_loop().time() + self.timeout_s)
                if self._error is not None:
                    raise DeliveryBrokenError(repr(self._error)) from self._error
                future: asyncio.Future[object] = await self._producer.send(
                    self._config.topics.records, value=value, key=key
                )
        except TimeoutError as exc:
            raise KafkaTimeoutError(f"nothing was acknowledged for {self.timeout_s:g} s") from exc
        self._in_flight_bytes += len(value)
        self._stats.records += 1
        self._stats.wire_bytes += len(value)
        self._pending.add(future)
        future.add_done_callback(lambda done: self._settle(done, len(value)))
        return future

    async def settled(self) -> None:
        """Returns when any record is acknowledged or refused.

        Raises:
            DeliveryBrokenError: one was refused.
        """
        if self._error is None:
            self._settled.clear()
            await self._settled.wait()
        if self._error is not None:
            raise DeliveryBrokenError(repr(self._error)) from self._error

    def _settle(self, future: asyncio.Future[object], size: int) -> None:
        self._pending.discard(future)
        self._in_flight_bytes -= size
        if future.cancelled():
            return
        if (error := future.exception()) is None:
            self._stats.progressed()
        else:
            self._error = self._error or error
        self._settled.set()


class BundleDelivery:
    """The records of one bundle; several bundles share a `Delivery`.

    Attributes:
        error: what Kafka said to the first record of this bundle that it refused, not to those of others.
    """

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._owed = 0
        self._progress_at = time.monotonic()
        self.error: BaseException | None = None

    async def send(self, key: bytes, value: bytes) -> None:
        """Hands a record over; waits while too much is unacknowledged.

        Raises:
            KafkaError: this or an earlier record, perhaps of another bundle, was refused or not acknowledged in time.
        """
        try:
            future = await self._delivery.send(key, value)
        except DeliveryBrokenError:
            raise
        except KafkaError as exc:
            self.error = self.error or exc
            raise
        self._owed += 1
        self._progress_at = time.monotonic()
        future.add_done_callback(self._settle)

    async def acknowledged(self) -> None:
        """Returns when every record of this bundle handed over so far is acknowledged.

        Raises:
            KafkaError: a record, perhaps of another bundle, was refused or not acknowledged in time.
        """
        while self._owed and self.error is None:
            left_s = self._progress_at + self._delivery.timeout_s - time.monotonic()
            try:
                async with asyncio.timeout(left_s):
                    await self._delivery.settled()
            except TimeoutError as exc:
                self.error = KafkaTimeoutError(
                    f"not acknowledged within {self._delivery.timeout_s:g} s: {counted(self._owed, 'record')}"
                )
                raise self.error from exc
        if self.error is not None:
            raise self.error

    def _settle(self, future: asyncio.Future[object]) -> None:
        self._owed -= 1
        self._progress_at = time.monotonic()
        if not future.cancelled() and (error := future.exception()) is not None:
            self.error = self.error or error
