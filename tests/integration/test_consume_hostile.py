"""The daemon against hostile records and little memory: each costs itself, never the daemon."""

import contextlib
import errno
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import MessageSizeTooLargeError

from fixtures.frames import ShardSource, events_of, frames_of
from fixtures.installation import PART_BYTES, Installation, keyed, running, shards, until
from rollcast.consumer import Daemon
from rollcast.consumer.dump_file import load_dump
from rollcast.consumer.errors import ConsumeConfigError, ScratchFullError
from rollcast.consumer.open_rollout import resident_size
from rollcast.consumer.scratch import Scratch
from rollcast.schemas import DEFAULT_LIMITS, DpShard, SamplePart, TensorSlice, decode, encode


async def test_a_record_with_a_huge_key_is_a_dead_letter_and_the_daemon_goes_on(installed: Installation) -> None:
    async with running(installed.config):
        await installed.send([(b"k" * 990_000, b"garbage"), *keyed("run", 1, frames_of("run", 1, 1, shards(1)))])
        (dead,) = await installed.dead_letters(1)
        await installed.dumps(1)

    assert dead.key == b"k" * 1024
    assert dead.value == b"garbage"
    installed.check("run", 1, shards(1))


async def test_a_dead_letter_that_the_broker_refuses_is_counted_and_the_daemon_goes_on(
    installed: Installation,
) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=installed.config.bootstrap_servers)
    await admin.start()
    try:
        topic = ConfigResource(
            ConfigResourceType.TOPIC, installed.topics.dead_letters, configs={"max.message.bytes": "2000"}
        )
        await admin.alter_configs([topic])
    finally:
        await admin.close()
    await installed.send([(b"x", b"small"), (b"x", b"long" * 2000)])
    await installed.send(keyed("run", 1, frames_of("run", 1, 1, shards(1))))

    async with running(installed.config) as daemon:
        await installed.dumps(1)
        await until(lambda: daemon.stats.lost_dead_letters == 1)
        (dead,) = await installed.dead_letters(1)

    assert dead.value == b"small"
    assert daemon.stats.dead_letters == {"decode": 2}


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
async def test_a_batch_that_would_expand_beyond_the_limit_is_refused_by_the_broker_and_a_small_one_is_read(
    installed: Installation, compression: str
) -> None:
    async with running(installed.config) as daemon:
        producer = AIOKafkaProducer(
            bootstrap_servers=installed.config.bootstrap_servers,
            compression_type=compression,
            max_request_size=2**28,
            acks="all",
        )
        await producer.start()
        try:
            with pytest.raises(MessageSizeTooLargeError):
                await producer.send_and_wait(installed.topics.records, bytes(2**26), key=b"x")
            for key, frame in keyed("run", 1, frames_of("run", 1, 1, shards(1))):
                await producer.send_and_wait(installed.topics.records, frame, key=key)
        finally:
            await producer.stop()
        await installed.dumps(1)
        await until(lambda: daemon.stats.dumps == 1)

    installed.check("run", 1, shards(1))
    assert daemon.stats.dead_letters == {}


HOSTILE = {
    "strings": ["no", "numbers", "here"],
    "tensors of other lengths": [torch.zeros(1), torch.zeros(7), torch.zeros(0)],
    "complex": [torch.zeros(2, dtype=torch.complex64)] * 3,
    "wrong shapes": [torch.zeros(2, 2), torch.tensor(1.0), torch.zeros(0, 3)],
    "bytes and bools": [torch.zeros(2, dtype=torch.uint8), torch.zeros(2, dtype=torch.bool), b"bytes"],
    "huge": [torch.full((2,), 1e308, dtype=torch.float64), [2**63 - 1, -(2**63)], [1.0, float("nan")]],
    "nested": [{"a": [torch.zeros(2)]}, (1, (2, 3)), [[1], [2]]],
}


@pytest.mark.parametrize("values", HOSTILE.values(), ids=HOSTILE)
async def test_a_rollout_with_hostile_values_costs_metrics_and_not_the_dump(
    installed: Installation, values: list[object]
) -> None:
    names = ("log_probs", "rollout_log_probs", "loss_masks", "entropy", "advantages", "rewards", "rollout_ids")
    hostile = ShardSource(
        rank=3, data_parallel_rank=0, rollout_data={"response_lengths": [2, 2, 2], **dict.fromkeys(names, values)}
    )
    async with running(installed.config) as daemon:
        await installed.send(keyed("run", 1, frames_of("run", 1, 1, [hostile])))
        (announced,) = await installed.dumps(1)
        points = await installed.metrics(6)

    assert announced.complete
    assert len(points) == 6
    assert daemon.stats.dumps == 1
    installed.check("run", 1, [hostile])


async def test_a_record_that_comes_after_the_incomplete_dump_replaces_it_by_the_complete_one(
    installed: Installation,
) -> None:
    config = replace(installed.config, incomplete_after_s=0.5)
    *most, last = keyed("run", 1, frames_of("run", 1, 1, shards(1), max_part_bytes=PART_BYTES))
    async with running(config) as daemon:
        await installed.send(most)
        await installed.dumps(1)
        await until(lambda: daemon.stats.incomplete_dumps == 1)
        await installed.send([last])
        first, second = await installed.dumps(2)

    assert (first.complete, second.complete) == (False, True)
    installed.check("run", 1, shards(1))
    assert [path.name for path in (installed.folder / "run").glob("*.pt")] == ["1.pt"]


@pytest.mark.parametrize("short_of", ["memory", "scratch"])
async def test_without_room_the_oldest_rollout_is_written_incomplete_and_the_rest_goes_on(
    installed: Installation, caplog: pytest.LogCaptureFixture, short_of: str
) -> None:
    one, two, three = (
        keyed("run", 1, frames_of("run", 1, rollout_id, shards(rollout_id), max_part_bytes=PART_BYTES))
        for rollout_id in (1, 2, 3)
    )
    # Room for one rollout and some of another; all in one partition, one after the other.
    if short_of == "memory":
        config = replace(installed.config, max_resident_bytes=int(1.7 * resident_bytes(one, installed.folder)))
    else:
        config = replace(installed.config, max_scratch_bytes=2**20 + 2**18)
    async with running(config) as daemon:
        await installed.send([*one[:-1], *two, *three])
        announced = await installed.dumps(3)
        await until(lambda: daemon.stats.dumps == 2)

    assert {(dump.rollout_id, dump.complete) for dump in announced} == {(1, False), (2, True), (3, True)}
    assert daemon.stats.given_up == 1
    assert daemon.stats.evicted == 1
    assert "to make room" in caplog.text
    for rollout_id in (2, 3):
        installed.check("run", rollout_id, shards(rollout_id))
    async with running(installed.config) as daemon:
        await installed.send(keyed("run", 1, frames_of("run", 1, 4, shards(4))))
        await installed.dumps(4)
        assert daemon.stats.records == len(frames_of("run", 1, 4, shards(4)))


@pytest.mark.parametrize("short_of", ["memory", "scratch"])
async def test_beside_a_dump_that_waits_with_nearly_all_the_room_others_are_written_incomplete_and_reading_goes_on(
    installed: Installation, short_of: str
) -> None:
    one, two, three = (
        keyed("run", 1, frames_of("run", 1, rollout_id, shards(rollout_id), max_part_bytes=PART_BYTES))
        for rollout_id in (1, 2, 3)
    )
    if short_of == "memory":
        config = replace(installed.config, max_resident_bytes=int(1.2 * resident_bytes(one, installed.folder)))
    else:
        config = replace(installed.config, max_scratch_bytes=2**20 + 2**18)
    in_the_way = installed.folder / "run" / "1.pt"
    in_the_way.mkdir(parents=True)
    async with running(config) as daemon:
        await installed.send([*one, *two])
        await until(lambda: daemon.stats.given_up >= 1 and daemon.stats.incomplete_dumps >= 1)
        assert daemon.stats.dumps == 0
        in_the_way.rmdir()
        await until(lambda: daemon.stats.dumps == 1)
        await installed.send(three)
        await until(lambda: daemon.stats.dumps == 2)

    for rollout_id in (1, 3):
        installed.check("run", rollout_id, shards(rollout_id))


async def test_the_right_part_after_a_forged_one_waits_for_room_in_a_full_scratch(installed: Installation) -> None:
    most_bytes = 2**20 + 2**18
    one, two, three, other = (
        list(events_of("run", 1, rollout_id, shards(seed), max_part_bytes=PART_BYTES))
        for rollout_id, seed in ((1, 1), (2, 2), (3, 3), (2, 4))
    )
    right, wrong = two[0], other[0]
    assert isinstance(right, SamplePart)
    assert isinstance(wrong, SamplePart)
    # Other tensors alone: whatever else it says would tell it from the right one without them.
    columns = zip(right.columns, wrong.columns, strict=True)
    forged = replace(wrong, columns=tuple(b if isinstance(b.value, TensorSlice) else a for a, b in columns))
    scratch = Scratch(installed.folder, most_bytes, DEFAULT_LIMITS)
    held = [scratch.place(event) for event in (*one, forged) if isinstance(event, SamplePart)]
    filling = []
    with contextlib.suppress(ScratchFullError):
        for event in three:
            if isinstance(event, SamplePart):
                held.append(scratch.place(event))
                filling.append(event)
    with pytest.raises(ScratchFullError):
        scratch.place(right, apart=True)

    async with running(replace(installed.config, max_scratch_bytes=most_bytes)) as daemon:
        before = [*one[:-1], forged, *filling]
        await installed.send(keyed("run", 1, map(encode, before)))
        await until(lambda: daemon.stats.records == len(before))
        await installed.send(keyed("run", 1, map(encode, two)))
        await until(lambda: daemon.stats.dumps == 1)

    installed.check("run", 2, shards(2))
    assert daemon.stats.given_up >= 1
    assert daemon.stats.duplicates == 0


def resident_bytes(records: list[tuple[bytes | None, bytes | None]], folder: Path) -> int:
    """What the records take in memory once their tensors are in the scratch."""
    scratch = Scratch(folder, 2**30, DEFAULT_LIMITS)
    total = 0
    for _, frame in records:
        event = decode(frame or b"")
        assert isinstance(event, (SamplePart, DpShard))
        total += resident_size(scratch.place(event) if isinstance(event, SamplePart) else event, len(frame or b""))
    return total


async def test_a_full_scratch_disk_is_waited_for(installed: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[int] = []
    reserve = os.posix_fallocate

    def full_at_first(descriptor: int, offset: int, size: int) -> None:
        if size >= 2**20 and len(failures) < 2:
            failures.append(size)
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full_at_first)
    async with running(installed.config) as daemon:
        await installed.send(keyed("run", 1, frames_of("run", 1, 1, shards(1))))
        await installed.dumps(1)

    assert daemon.stats.retries == 2
    installed.check("run", 1, shards(1))


async def test_a_scratch_folder_that_cannot_be_used_is_told_at_the_start(installed: Installation) -> None:
    (installed.folder / "file").touch()

    with pytest.raises(ConsumeConfigError, match="--scratch-dir"):
        await Daemon(replace(installed.config, scratch_dir=str(installed.folder / "file" / "below"))).run()


async def test_both_of_two_contradicting_closing_events_are_dead_letters_and_the_first_counts(
    installed: Installation,
) -> None:
    events = list(events_of("run", 1, 1, shards(1, shard_count=1)))
    closing = events[-1]
    assert isinstance(closing, DpShard)
    others = [replace(closing, raw_bytes=closing.raw_bytes + more) for more in (1, 2)]
    async with running(installed.config) as daemon:
        await installed.send(keyed("run", 1, map(encode, [closing, *others, *events[:-1]])))
        dead = await installed.dead_letters(3)
        await installed.dumps(1)

    assert sorted(letter.value for letter in dead) == sorted(map(encode, [closing, *others]))
    assert all(letter.reason.startswith("conflict") for letter in dead)
    assert daemon.stats.by_run == {("run", "conflict"): 3}
    installed.check("run", 1, shards(1, shard_count=1))


async def test_what_the_log_says_of_a_record_is_bounded(
    installed: Installation, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rollcast.consumer")
    config = replace(installed.config, incomplete_after_s=0.5)
    events = list(events_of("run", 1, 1, shards(1)))
    closing = next(event for event in events if isinstance(event, DpShard))
    part = next(event for event in events if isinstance(event, SamplePart))
    dropped = replace(closing, rollout_id=2, dropped_reason="x" * 100_000, slot_digests=(), part_counts=())
    many = replace(
        closing,
        rollout_id=3,
        data_parallel_size=60_000,
        sample_count=20_000,
        slot_digests=closing.slot_digests[:1] * 20_001,
        part_counts=(1,) * 20_001,
    )
    twice = replace(part, rollout_id=4, part_count=1, columns=(replace(part.columns[0], name="n" * 1_000),) * 2)
    sent: list[DpShard | SamplePart] = [dropped, many, twice]
    async with running(config) as daemon:
        await installed.send(keyed("run", 1, map(encode, sent)))
        await until(lambda: daemon.stats.incomplete_dumps == 2 and daemon.stats.dropped == 1)
        await until(lambda: daemon.stats.dead_letters["content"] == 1)

    assert max(len(record.getMessage()) for record in caplog.records) < 1200
    assert len(load_dump(installed.folder / "run" / "3.incomplete.pt")["samples"]) == 0
