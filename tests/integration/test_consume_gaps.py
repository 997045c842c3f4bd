"""Records that are gone before they are read: a recorded gap, marked rollouts, and reading from the beginning."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import RecordsToDelete

from fixtures.frames import frames_of
from fixtures.installation import (
    PART_BYTES,
    Installation,
    admin_client,
    installation,
    keyed,
    running,
    shards,
    until,
    until_it_is_so,
)
from rollcast.consumer import LocalDumpStore
from rollcast.consumer.broker import Broker
from rollcast.consumer.rollout import OffsetSpan
from rollcast.consumer.store import Dump, Manifest, PublishedDump
from rollcast.consumer.store.manifest import manifest_path
from rollcast.consumer.store.reading import parse_manifest
from rollcast.consumer.topics import prepare_topics


@pytest.fixture
async def one_partition(broker: Broker, tmp_path: Path) -> Installation:
    made = installation(broker.bootstrap_servers, tmp_path)
    made.config = replace(made.config, partitions=1, incomplete_after_s=1.0)
    await prepare_topics(made.config)
    return made


def at(installed: Installation) -> TopicPartition:
    return TopicPartition(installed.topics.records, 0)


async def move_log_start(installed: Installation, offset: int) -> None:
    """Deletes the records below the offset, as retention does."""
    async with admin_client(installed.config.bootstrap_servers) as admin:
        await admin.delete_records({at(installed): RecordsToDelete(before_offset=offset)})


async def recreate_topic(installed: Installation) -> None:
    async with admin_client(installed.config.bootstrap_servers) as admin:

        async def gone() -> bool:
            return installed.topics.records not in await admin.list_topics()

        await admin.delete_topics([installed.topics.records])
        await until_it_is_so(gone)
    await prepare_topics(installed.config)


async def until_committed(installed: Installation, offset: int) -> None:
    async def so() -> bool:
        return (await installed.committed()).get(0) == offset

    await until_it_is_so(so)


def rollout(rollout_id: int) -> list[tuple[bytes | None, bytes | None]]:
    return keyed("run", rollout_id, frames_of("run", 1, rollout_id, shards(rollout_id), max_part_bytes=PART_BYTES))


def manifest(installed: Installation, name: str) -> Manifest:
    found = parse_manifest(manifest_path(installed.folder / "run" / name))
    assert found is not None
    return found


async def test_reading_starts_where_the_log_starts_and_what_lies_before_is_recorded_as_a_gap(
    one_partition: Installation,
) -> None:
    one, two, three = rollout(1), rollout(2), rollout(3)
    async with running(one_partition.config):
        await one_partition.send(one)
        await one_partition.dumps(1)
    log_start = len(one) + len(two) // 2
    await one_partition.send(two + three)
    await move_log_start(one_partition, log_start)

    async with running(one_partition.config) as daemon:
        announced = await one_partition.dumps(3)
        (dead,) = await one_partition.dead_letters(1)
        await until(lambda: daemon.stats.incomplete_dumps == 1)

    gap = OffsetSpan(0, len(one), log_start - 1)
    assert daemon.stats.records == len(one + two + three) - log_start
    assert (daemon.stats.gaps, daemon.stats.gap_offsets) == (1, gap.last - gap.first + 1)
    assert (dead.partition, dead.offset, dead.value) == (0, gap.first, b"")
    assert f"offsets {gap.first} to {gap.last} are gone" in dead.reason
    assert {(dump.rollout_id, dump.complete) for dump in announced} == {(1, True), (2, False), (3, True)}
    assert manifest(one_partition, "2.incomplete.pt").gaps == (gap,)
    assert manifest(one_partition, "3.pt").gaps == ()
    one_partition.check("run", 3, shards(3))


class BlockingStore(LocalDumpStore):
    """A store that hangs in a write until it is released."""

    def __init__(self, template: str) -> None:
        super().__init__(template)
        self.entered, self.released = threading.Event(), threading.Event()

    def publish(self, dump: Dump) -> PublishedDump:
        self.entered.set()
        self.released.wait()
        return super().publish(dump)


async def test_retention_that_overtakes_a_slow_daemon_is_recorded_as_a_gap(
    one_partition: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollcast.consumer.kafka_client._MAX_PARTITION_FETCH_BYTES", PART_BYTES)
    store = BlockingStore(one_partition.config.dump_path)
    # One is being written and two are queued; the reader waits with the fourth and does not fetch the fifth.
    four = [frame for rollout_id in range(4) for frame in rollout(rollout_id)]
    five, six = rollout(5), rollout(6)
    log_start = len(four) + len(five) - 2
    async with running(one_partition.config, store) as daemon:
        try:
            await one_partition.send(four)
            await asyncio.to_thread(store.entered.wait)
            await until(lambda: daemon.stats.records == len(four))
            await one_partition.send(five)
            await move_log_start(one_partition, log_start)
        finally:
            store.released.set()
        await one_partition.send(six)
        announced = await one_partition.dumps(6)
        await until(lambda: daemon.stats.incomplete_dumps == 1)

    assert daemon.stats.gaps == 1
    assert {dump.rollout_id for dump in announced if dump.complete} == {0, 1, 2, 3, 6}
    (gap,) = manifest(one_partition, "5.incomplete.pt").gaps
    assert gap.first >= len(four)
    assert gap.last == log_start - 1


async def test_a_committed_offset_beyond_the_end_of_the_log_starts_at_the_beginning(
    one_partition: Installation,
) -> None:
    committing = AIOKafkaConsumer(
        bootstrap_servers=one_partition.config.bootstrap_servers, group_id=one_partition.config.group_id
    )
    await committing.start()
    committing.assign([at(one_partition)])
    await committing.commit({at(one_partition): 5000})
    await committing.stop()
    await one_partition.send(rollout(1))

    async with running(one_partition.config) as daemon:
        await one_partition.dumps(1)
        (dead,) = await one_partition.dead_letters(1)

    assert "to 4999 are gone" in dead.reason
    assert daemon.stats.gaps == 1
    one_partition.check("run", 1, shards(1))
    async with running(one_partition.config) as daemon:
        await one_partition.send(rollout(2))
        await one_partition.dumps(2)
        assert daemon.stats.records == len(rollout(2))


async def test_the_records_of_a_topic_that_is_created_anew_in_mid_run_are_read_from_the_first(
    one_partition: Installation,
) -> None:
    one, two, three = rollout(1), rollout(2), rollout(3)
    async with running(replace(one_partition.config, incomplete_after_s=60.0)) as daemon:
        await one_partition.send(one + two[:3])
        await one_partition.dumps(1)
        await until_committed(one_partition, len(one))
        await until(lambda: daemon.stats.records == len(one) + 3)
        await recreate_topic(one_partition)
        await one_partition.send(three + two)
        announced = await one_partition.dumps(3)
        (dead,) = await one_partition.dead_letters(1)
    assert f"offsets {len(one)} to {len(one) + 2} are gone" in dead.reason
    assert all(dump.complete for dump in announced)
    for rollout_id in (2, 3):
        one_partition.check("run", rollout_id, shards(rollout_id))

    async with running(one_partition.config) as daemon:
        await one_partition.send(rollout(4))
        await one_partition.dumps(4)
        assert daemon.stats.records == len(rollout(4))


async def test_the_records_of_a_topic_that_was_created_anew_while_the_daemon_was_away_are_read_from_the_first(
    one_partition: Installation,
) -> None:
    async with running(one_partition.config):
        await one_partition.send(rollout(1))
        await one_partition.dumps(1)
    await recreate_topic(one_partition)
    two = rollout(2)
    await one_partition.send(two * 3)

    async with running(one_partition.config) as daemon:
        await one_partition.dumps(2)
        await until(lambda: daemon.stats.records == 3 * len(two))
    one_partition.check("run", 2, shards(2))
