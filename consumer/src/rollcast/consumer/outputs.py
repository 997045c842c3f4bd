"""What the daemon sends: dump announcements, metrics and dead letters."""

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from aiokafka import AIOKafkaProducer

from rollcast.consumer.config import ConsumeConfig
from rollcast.consumer.kafka_client import client_options
from rollcast.consumer.store import PublishedDump
from rollcast.schemas import DeadLetter, DumpCompleted, Event, MetricPoint, encode, record_key

# A connection that has gone silent is given up after that; what it had in flight is sent again.
_REQUEST_TIMEOUT_MS = 10_000
_MAX_KEY_BYTES = 1024
_MAX_VALUE_BYTES = 64 * 1024
_MAX_REASON_CHARS = 2_000


def dead_letter(topic: str, partition: int, offset: int, *, key: bytes | None, value: bytes, reason: str) -> DeadLetter:
    """Returns the dead letter of a record; a long key or value is cut."""
    return DeadLetter(
        topic=topic,
        partition=partition,
        offset=offset,
        reason=reason[:_MAX_REASON_CHARS],
        key=key[:_MAX_KEY_BYTES] if key is not None else None,
        value=value[:_MAX_VALUE_BYTES],
        value_bytes=len(value),
        seen_at_ms=time.time_ns() // 1_000_000,
    )


class Outputs:
    """Sends results with acks=all; a repeat after a failure is harmless, since keys tell it.

    Each method returns when the brokers have everything.

    Raises (each method):
        KafkaError: they do not; what was sent may be there in part.
    """

    def __init__(self, config: ConsumeConfig) -> None:
        self._topics = config.topics
        self._producer: Any = AIOKafkaProducer(
            **client_options(config), acks="all", linger_ms=5, request_timeout_ms=_REQUEST_TIMEOUT_MS
        )

    async def start(self) -> None:
        """Connects."""
        await self._producer.start()

    async def stop(self) -> None:
        """Sends what is buffered and disconnects."""
        await self._producer.stop()

    async def send_dead_letters(self, letters: Iterable[DeadLetter]) -> None:
        """Sends dead letters, keyed by the place of their record."""
        await self._send(
            (self._topics.dead_letters, f"{letter.topic}/{letter.partition}/{letter.offset}".encode(), letter)
            for letter in letters
        )

    async def announce(self, published: PublishedDump) -> None:
        """Sends the metrics of a complete dump, then the announcement that it is there; nothing of a removed one."""
        if published.removed:
            return
        manifest = published.manifest
        run_id, attempt, rollout_id = manifest.id.run_id, manifest.id.attempt, manifest.id.rollout_id
        key = record_key(run_id, rollout_id, manifest.id.stream)
        if manifest.complete:
            await self._send(
                (
                    self._topics.metrics,
                    key + f"/{metric.name}".encode(),
                    MetricPoint(
                        run_id=run_id,
                        attempt=attempt,
                        rollout_id=rollout_id,
                        name=metric.name,
                        per_rollout_mean=metric.per_rollout_mean,
                        per_token_mean=metric.per_token_mean,
                        rollout_count=metric.rollout_count,
                        token_count=metric.token_count,
                        non_finite_count=metric.non_finite_count,
                        computed_at_ms=manifest.written_at_ms,
                    ),
                )
                for metric in manifest.metrics
            )
        completed = DumpCompleted(
            run_id=run_id,
            attempt=attempt,
            stream=manifest.id.stream,
            rollout_id=rollout_id,
            path=str(published.path),
            sha256=manifest.sha256,
            file_bytes=manifest.file_bytes,
            complete=manifest.complete,
            shard_count=manifest.shards,
            sample_count=manifest.samples,
            part_count=manifest.parts,
            completed_at_ms=manifest.written_at_ms,
        )
        await self._send([(self._topics.dumps, key, completed)])

    async def _send(self, records: Iterable[tuple[str, bytes, Event]]) -> None:
        deliveries = [await self._producer.send(topic, key=key, value=encode(event)) for topic, key, event in records]
        await asyncio.gather(*deliveries)
