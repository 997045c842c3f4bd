"""The daemon beside a Kafka that changes: members and partitions come, brokers are silent, gone and back."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, RecordsToDelete

from fixtures.frames import frames_of
from fixtures.installation import PART_BYTES, Installation, installation, keyed, running, shards, until
from rollcast.consumer.broker import Broker, JvmBroker
from rollcast.consumer.topics import prepare_topics


async def test_topics_that_are_created_are_named_once(
    broker: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = installation(broker.bootstrap_servers, tmp_path).config
    caplog.set_level("INFO", "rollcast.consumer")
    await prepare_topics(config)
    await prepare_topics(config)
    (told,) = [record.getMessage() for record in caplog.records]
    names = ", ".join(config.topics.settings(1))
    assert told == f"created 4 topics at {broker.bootstrap_servers}: {names}"


async def test_a_coordinator_that_has_just_moved_does_not_send_the_daemon_back_to_the_beginning(
    installed: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = keyed("run", 1, frames_of("run", 1, 1, shards(1)))
    async with running(installed.config):
        await installed.send(frames)
        await installed.dumps(1)
    asked = []
    ask = AIOKafkaAdminClient.list_consumer_group_offsets

    async def answer_nothing_at_first(self: AIOKafkaAdminClient, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        asked.append(args)
        return {} if len(asked) == 1 else await ask(self, *args, **kwargs)

    monkeypatch.setattr(AIOKafkaAdminClient, "list_consumer_group_offsets", answer_nothing_at_first)
    async with running(installed.config) as daemon:
        await installed.send(frames[:1])
        await until(lambda: daemon.stats.records > 0)

    assert len(asked) == 2
    assert daemon.stats.records == 1


async def test_a_rollout_whose_rest_waits_in_a_silent_broker_is_not_written_as_incomplete(
    own_broker: JvmBroker, tmp_path: Path
) -> None:
    installed = installation(own_broker.bootstrap_servers, tmp_path / "dumps")
    # Above the 2 s that count of any pause, by more than a busy machine takes to send the rest.
    config = replace(installed.config, incomplete_after_s=5.0)
    await prepare_topics(config)
    frames = keyed("run", 1, frames_of("run", 1, 1, shards(1)))
    assert own_broker.pid is not None
    async with running(config) as daemon:
        await installed.send(frames[:2])
        await until(lambda: daemon.stats.records == 2)
        os.kill(own_broker.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(1.5 * config.incomplete_after_s)
        finally:
            os.kill(own_broker.pid, signal.SIGCONT)
        await installed.send(frames[2:])
        await installed.dumps(1)

    assert daemon.stats.incomplete_dumps == 0
    installed.check("run", 1, shards(1))


async def test_records_in_added_partitions_are_read(installed: Installation) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=installed.config.bootstrap_servers)
    await admin.start()
    try:
        async with running(installed.config) as daemon:
            await admin.create_partitions({installed.topics.records: NewPartitions(total_count=8)})
            for rollout_id in range(8):
                await installed.send(keyed("run", rollout_id, frames_of("run", 1, rollout_id, shards(rollout_id))))
            await installed.dumps(8)
    finally:
        await admin.close()

    assert daemon.stats.dumps == 8


async def test_two_members_share_the_work_and_every_dump_is_right(installed: Installation) -> None:
    async with running(installed.config), running(installed.config):
        for rollout_id in range(8):
            await installed.send(keyed("run", rollout_id, frames_of("run", 1, rollout_id, shards(rollout_id))))
        announced = await installed.dumps(8)

    assert {dump.rollout_id for dump in announced} == set(range(8))
    for rollout_id in range(8):
        installed.check("run", rollout_id, shards(rollout_id))


async def test_a_committed_offset_that_the_broker_has_deleted_does_not_stop_the_rest(installed: Installation) -> None:
    async with running(installed.config):
        await installed.send(keyed("run", 1, frames_of("run", 1, 1, shards(1))))
        await installed.dumps(1)
    await installed.send(keyed("run", 1, [b"deleted before it was read"] * 5))
    admin = AIOKafkaAdminClient(bootstrap_servers=installed.config.bootstrap_servers)
    await admin.start()
    try:
        for partition in range(installed.config.partitions):
            everything = RecordsToDelete(before_offset=-1)
            await admin.delete_records({TopicPartition(installed.topics.records, partition): everything})
    finally:
        await admin.close()

    async with running(installed.config) as daemon:
        await installed.send(keyed("run", 1, frames_of("run", 2, 1, shards(2))))
        await installed.dumps(2)

    assert daemon.stats.dead_letters.total() == 0
    installed.check("run", 1, shards(2))


async def test_a_broker_that_is_killed_and_comes_back_costs_nothing(own_broker: JvmBroker, tmp_path: Path) -> None:
    made = installation(own_broker.bootstrap_servers, tmp_path)
    frames = keyed("run", 1, frames_of("run", 1, 1, shards(1), max_part_bytes=PART_BYTES))
    async with running(made.config):
        await made.send(frames[:5])
        await asyncio.to_thread(own_broker.kill)
        await asyncio.to_thread(own_broker.start)
        await made.send(frames[5:])
        await made.dumps(1)
    made.check("run", 1, shards(1))
