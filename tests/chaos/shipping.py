"""The producer of the chaos test: plain, at least once."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from aiokafka import AIOKafkaProducer

from chaos.story import Record

_REQUEST_TIMEOUT_MS: Final = 10_000
_RETRY_AFTER_S: Final = 0.5


class Shipper:
    """Sends records until each is acknowledged; what was not is sent again, though it may have arrived.

    Args:
        bootstrap_servers: the broker.
        topic: of the records.
        report: takes a line when something is sent again.
    """

    def __init__(self, bootstrap_servers: str, topic: str, report: Callable[[str], None]) -> None:
        self._topic, self._report = topic, report
        self._producer: Any = AIOKafkaProducer(
            bootstrap_servers=bootstrap_servers, acks="all", request_timeout_ms=_REQUEST_TIMEOUT_MS
        )

    async def __aenter__(self) -> "Shipper":
        await self._producer.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._producer.stop()

    async def ship(self, records: Sequence[Record]) -> None:
        """Returns when the broker has all of them."""
        while True:
            results = await asyncio.gather(*map(self._send, records), return_exceptions=True)
            failed = [index for index, result in enumerate(results) if isinstance(result, BaseException)]
            if not failed:
                return
            self._report(f"{len(failed)} of {len(records)} records are sent again: {results[failed[0]]!r}")
            records = [records[index] for index in failed]
            await asyncio.sleep(_RETRY_AFTER_S)

    async def _send(self, record: Record) -> None:
        key, value = record
        await self._producer.send_and_wait(self._topic, value, key=key)
