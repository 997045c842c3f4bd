"""One Kafka producer and what it still owes an acknowledgement for."""

import asyncio
from types import TracebackType
from typing import Self

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from rollcast.producer.shipper.config import ShipperConfig

_REQUEST_ROOM_BYTES = 64 * 1024
_CLOSE_TIMEOUT_S = 5.0


class Delivery:
    """Sends records with acks=all and idempotence, at most so many bytes unacknowledged.

    After any error the object is used up: close it, make a new one, and send everything unacknowledged again.

    Args:
        config: of the shipper.
        max_batch_bytes: the topic's limit, which is on whole batches.
    """

    def __init__(self, config: ShipperConfig, max_batch_bytes: int) -> None:
        self._config = config
        self._producer = AIOKafkaProducer(
            bootstrap_servers=config.bootstrap_servers,
            client_id="rollcast-ship",
            acks="all",
            enable_idempotence=True,
            # The parts are compressed already, so what the client counts is what the broker counts.
            compression_type=None,
            max_request_size=config.max_part_bytes + _REQUEST_ROOM_BYTES,
            max_batch_size=min(max_batch_bytes, config.max_part_bytes + _REQUEST_ROOM_BYTES // 2),
            request_timeout_ms=config.delivery_timeout_ms,
            linger_ms=2,
        )
        self._in_flight_bytes = 0
        self._pending: set[asyncio.Future[object]] = set()
        self._acknowledged = asyncio.Event()
        self._error: BaseException | None = None

    async def __aenter__(self) -> Self:
        """Connects.

        Raises:
            KafkaError: no broker answers.
        """
        await self._producer.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes within a bound; what is unacknowledged then is nobody's any more."""
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._producer.stop()
        except (TimeoutError, KafkaError):
            for future in self._pending:
                future.cancel()

    async def send(self, key: bytes, value: bytes) -> None:
        """Hands a record over; waits while too much is unacknowledged.

        Raises:
            KafkaError: this or an earlier record was refused or not acknowledged in time.
        """
        while self._pending and self._in_flight_bytes + len(value) > self._config.max_in_flight_bytes:
            self._acknowledged.clear()
            await self._acknowledged.wait()
            self._raise_error()
        future = await self._producer.send(self._config.topics.records, value=value, key=key)
        self._in_flight_bytes += len(value)
        self._pending.add(future)
        future.add_done_callback(lambda done: self._settle(done, len(value)))

    async def acknowledged(self) -> None:
        """Returns when every record handed over so far is acknowledged.

        Raises:
            KafkaError: one was refused or not acknowledged in time.
        """
        while self._pending:
            self._acknowledged.clear()
            await self._acknowledged.wait()
            self._raise_error()
        self._raise_error()

    def _settle(self, future: asyncio.Future[object], size: int) -> None:
        self._pending.discard(future)
        self._in_flight_bytes -= size
        if not future.cancelled() and (error := future.exception()) is not None:
            self._error = self._error or error
        self._acknowledged.set()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
