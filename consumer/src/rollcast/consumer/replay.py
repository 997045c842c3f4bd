"""Reads parts of the records topic again, as no member of any group."""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.partitioner import DefaultPartitioner

from rollcast.consumer.brief import brief
from rollcast.consumer.config import ConsumeConfig
from rollcast.consumer.errors import ConsumeError
from rollcast.consumer.kafka_client import client_options
from rollcast.consumer.store import Manifest
from rollcast.consumer.streams import run_of_key

_POLL_MS = 500
_SILENCE_S = 30.0
_CLOSE_TIMEOUT_S = 5.0
_MOST_RUNS = 100

_log = logging.getLogger("rollcast.consumer")


@dataclass(frozen=True, slots=True)
class Range:
    """Offsets of one partition.

    Attributes:
        partition: its number.
        first: the first offset.
        end: the one after the last.
    """

    partition: int
    first: int
    end: int


class Replay:
    """A reader of the records topic as it stands when it is entered; use it as an async context manager.

    Raises (each method):
        KafkaError: the brokers do not answer.
    """

    def __init__(self, config: ConsumeConfig) -> None:
        self._topic = config.topics.records
        self._consumer: Any = AIOKafkaConsumer(
            self._topic,
            **client_options(config),
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
        )
        self._whole: dict[int, Range] = {}
        self._runs: set[str] = set()

    async def __aenter__(self) -> "Replay":
        """Connects, and notes what is there."""
        await self._consumer.start()
        try:
            # Subscribed only to learn of its partitions: another range of them is assigned for each reading.
            numbers = sorted(self._consumer.partitions_for_topic(self._topic) or ())
            self._consumer.unsubscribe()
            partitions = [TopicPartition(self._topic, partition) for partition in numbers]
            self._consumer.assign(partitions)
            first = await self._consumer.beginning_offsets(partitions)
            end = await self._consumer.end_offsets(partitions)
        except BaseException:
            await self._consumer.stop()
            raise
        self._whole = {at.partition: Range(at.partition, first[at], end[at]) for at in partitions}
        return self

    async def __aexit__(self, *_: object) -> None:
        """Disconnects, within a bound."""
        # The client's own tasks can miss the cancellation right after an assignment; the end of the loop repeats it.
        closing = asyncio.create_task(self._consumer.stop())
        await asyncio.wait({closing}, timeout=_CLOSE_TIMEOUT_S)
        if not closing.done():
            closing.cancel()
        elif not closing.cancelled() and (problem := closing.exception()) is not None:
            _log.warning("the connection could not be closed in order: %r", problem)

    def everything(self) -> list[Range]:
        """Returns what is there of all partitions."""
        return list(self._whole.values())

    def runs(self) -> list[str]:
        """Returns the runs of the records that were read, a hundred at most, in order."""
        return sorted(self._runs)

    def likely(self, key: bytes, known: Manifest | None) -> list[Range]:
        """Returns where the records of a rollout are: as its manifest tells, else the partition of its key."""
        if known is not None:
            return [Range(span.partition, span.first, span.last + 1) for span in known.offsets]
        partitions = sorted(self._whole)
        return [self._whole[DefaultPartitioner()(key, partitions, partitions)]]

    async def records(self, ranges: Iterable[Range], keys: Collection[bytes]) -> AsyncIterator[Any]:
        """Yields the records with one of these keys in these ranges, as far as they are still there.

        Raises:
            ConsumeError: nothing came for too long.
        """
        left = self._bounds(ranges)
        if not left:
            return
        self._consumer.assign([TopicPartition(self._topic, partition) for partition in left])
        for partition, bounds in left.items():
            self._consumer.seek(TopicPartition(self._topic, partition), bounds.first)
        heard_at = asyncio.get_running_loop().time()
        while left:
            batches = await self._consumer.getmany(timeout_ms=_POLL_MS)
            now = asyncio.get_running_loop().time()
            heard_at = now if batches else heard_at
            if now - heard_at > _SILENCE_S:
                raise ConsumeError(f"{self._topic} gave no record for {_SILENCE_S:g} s before its end; try again")
            for at, batch in batches.items():
                for record in batch:
                    self._note_run(record.key)
                    if at.partition in left and record.offset < left[at.partition].end and record.key in keys:
                        yield record
            for partition in list(left):
                at = TopicPartition(self._topic, partition)
                # Behind the last record there can be markers of transactions, which nobody is given.
                if await self._consumer.position(at) >= left[partition].end:
                    del left[partition]
                    self._consumer.pause(at)

    def _note_run(self, key: bytes | None) -> None:
        if len(self._runs) < _MOST_RUNS and (run := run_of_key(key or b"")) is not None:
            self._runs.add(brief(run))

    def _bounds(self, ranges: Iterable[Range]) -> dict[int, Range]:
        """Returns one range for each partition, as far as it is there."""
        bounds: dict[int, Range] = {}
        for each in ranges:
            whole = self._whole.get(each.partition)
            if whole is None:
                continue
            other = bounds.get(each.partition, each)
            first = max(whole.first, min(each.first, other.first))
            end = min(whole.end, max(each.end, other.end))
            bounds[each.partition] = Range(each.partition, first, end)
        return {partition: each for partition, each in bounds.items() if each.first < each.end}
