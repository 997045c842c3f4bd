"""The daemon on a real Kafka: records in any order become verified dumps, whatever else is on the topic."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fixtures.frames import events_of, frames_of
from fixtures.installation import PART_BYTES, Installation, keyed, running, shards, until
from rollcast.consumer import Daemon, LocalDumpStore
from rollcast.consumer.dump_file import load_dump
from rollcast.consumer.errors import AssemblerFullError
from rollcast.consumer.store import Dump, PublishedDump
from rollcast.schemas import DeadLetter, DpShard, SamplePart, encode


def shuffled(seed: int, frames: list[Any]) -> list[Any]:
    random.Random(seed).shuffle(frames)  # noqa: S311 - not for secrets
    return frames


async def test_shuffled_repeated_and_polluted_records_become_the_direct_dumps(installed: Installation) -> None:
    wanted = {("a", 1): shards(1), ("a", 2): shards(2), ("b", 1): shards(3, shard_count=1)}
    frames: list[tuple[bytes | None, bytes | None]] = []
    for (run_id, rollout_id), sources in wanted.items():
        made = frames_of(run_id, 5, rollout_id, sources, max_part_bytes=PART_BYTES)
        frames += keyed(run_id, rollout_id, made + made[::3])
    a_frame = frames[0][1]
    assert a_frame is not None
    letter = DeadLetter(topic="t", partition=0, offset=0, reason="r", key=None, value=b"", value_bytes=0, seen_at_ms=0)
    garbage = [b"garbage", None, a_frame + b"JUNK", a_frame[:-3], b"\xc3\x01" + b"\0" * 8, encode(letter)]
    frames += [(b"x", value) for value in garbage]
    frames = shuffled(7, frames)

    async with running(installed.config) as daemon:
        await installed.send(frames)
        announced = await installed.dumps(len(wanted))
        dead = await installed.dead_letters(len(garbage))
        points = await installed.metrics(6 * len(wanted))

    assert {(dump.run_id, dump.rollout_id) for dump in announced} == wanted.keys()
    assert all(dump.complete and dump.attempt == 5 for dump in announced)
    for (run_id, rollout_id), sources in wanted.items():
        installed.check(run_id, rollout_id, sources)
    assert sorted(letter.value for letter in dead) == sorted(value or b"" for value in garbage)
    assert all(letter.reason and letter.topic == installed.topics.records for letter in dead)
    reward = next(point for point in points if (point.run_id, point.rollout_id, point.name) == ("a", 1, "reward"))
    assert (reward.per_rollout_mean, reward.token_count) == (1.0, 6)
    assert daemon.stats.records == len(frames)
    assert daemon.stats.dumps == len(wanted)


async def test_after_a_restart_nothing_changes_and_everything_is_committed(installed: Installation) -> None:
    frames = keyed("run", 1, frames_of("run", 1, 1, shards(1), max_part_bytes=PART_BYTES))
    async with running(installed.config):
        await installed.send(frames)
        await installed.dumps(1)
    before = installed.digests()

    async with running(installed.config) as daemon:
        await installed.send(frames[:2])
        await until(lambda: daemon.stats.duplicates == 2)
        assert daemon.stats.records == 2

    assert installed.digests() == before


async def test_whoever_reads_everything_again_recognises_what_is_published(installed: Installation) -> None:
    frames = keyed("run", 1, frames_of("run", 1, 1, shards(1), max_part_bytes=PART_BYTES))
    async with running(installed.config):
        await installed.send(frames)
        (first,) = await installed.dumps(1)
    before = installed.digests()

    async with running(replace(installed.config, group_id=f"{installed.config.group_id}-again")) as daemon:
        again = await installed.dumps(2)

    assert again == [first, first]
    assert daemon.stats.already_published == 1
    assert daemon.stats.dumps == 0
    assert installed.digests() == before


async def test_a_resumed_run_replaces_a_rollout_and_keeps_the_old_dump(installed: Installation) -> None:
    async with running(installed.config) as daemon:
        await installed.send(keyed("run", 1, frames_of("run", 1, 1, shards(1))))
        await installed.dumps(1)
        await installed.send(keyed("run", 1, frames_of("run", 2, 1, shards(2))))
        announced = await installed.dumps(2)
        await installed.send(keyed("run", 1, frames_of("run", 1, 1, shards(1))[:1]))
        await until(lambda: daemon.stats.stale == 1)

    assert [dump.attempt for dump in announced] == [1, 2]
    installed.check("run", 1, shards(2))
    assert (installed.folder / "run" / "1.attempt-1.pt").exists()


async def test_what_stays_incomplete_is_written_as_such_with_what_is_missing(installed: Installation) -> None:
    config = replace(installed.config, incomplete_after_s=0.5)
    events = [
        event
        for event in events_of("run", 1, 1, shards(1))
        if not (isinstance(event, SamplePart) and (event.data_parallel_rank, event.slot) == (1, 2))
    ]
    async with running(config) as daemon:
        await installed.send(keyed("run", 1, map(encode, events)))
        (announced,) = await installed.dumps(1)
        await until(lambda: daemon.stats.incomplete_dumps == 1)

    assert not announced.complete
    assert announced.sample_count == 5
    path = Path(announced.path)
    assert path.name == "1.incomplete.pt"
    assert len(load_dump(path)["samples"]) == 5


async def test_a_slot_with_wrong_content_is_a_dead_letter_and_the_right_one_still_completes(
    installed: Installation,
) -> None:
    events = list(events_of("run", 1, 1, shards(1)))
    at = next(index for index, event in enumerate(events) if isinstance(event, SamplePart) and event.slot == 1)
    right, other = events[at], events[at - 1]
    assert isinstance(right, SamplePart)
    assert isinstance(other, SamplePart)
    wrong = replace(right, columns=other.columns)

    async with running(installed.config):
        await installed.send(keyed("run", 1, [encode(wrong), *(encode(event) for event in events if event != right)]))
        (dead,) = await installed.dead_letters(1)
        await installed.send(keyed("run", 1, [encode(right)]))
        (announced,) = await installed.dumps(1)

    assert dead.value == encode(wrong)
    assert "digest" in dead.reason
    assert announced.complete
    installed.check("run", 1, shards(1))


async def test_a_wrong_part_that_comes_first_costs_nothing_but_itself(installed: Installation) -> None:
    events = list(events_of("run", 1, 1, shards(1), max_part_bytes=PART_BYTES))
    wrong: list[SamplePart] = []
    for event in events:
        if isinstance(event, SamplePart) and event.slot == 1 and event.part in (0, 1):
            columns = next(other.columns for other in events if isinstance(other, SamplePart) and other.slot == 2)
            wrong.append(replace(event, columns=columns))

    async with running(installed.config) as daemon:
        await installed.send(keyed("run", 1, map(encode, [*wrong, *events])))
        (announced,) = await installed.dumps(1)
        dead = await installed.dead_letters(len(wrong))
        await until(lambda: daemon.stats.dumps == 1)

    assert announced.complete
    installed.check("run", 1, shards(1))
    assert sorted(letter.value for letter in dead) == sorted(map(encode, wrong))
    assert all("has the announced digest" in letter.reason for letter in dead)
    assert sum((await installed.committed()).values()) == len(wrong) + len(events)


async def test_a_dropped_rollout_moves_the_offset_and_makes_no_dump(installed: Installation) -> None:
    shard = next(event for event in events_of("run", 1, 1, shards(1)) if isinstance(event, DpShard))
    dropped = replace(shard, dropped_reason="spool full", slot_digests=(), part_counts=())
    async with running(installed.config) as daemon:
        await installed.send(keyed("run", 1, [encode(dropped)]))
        await until(lambda: daemon.stats.dropped == 1)
    async with running(installed.config) as daemon:
        await installed.send(keyed("run", 2, frames_of("run", 1, 2, shards(2))))
        await installed.dumps(1)
        assert daemon.stats.dropped == 0

    assert [path.name for path in (installed.folder / "run").glob("*.pt")] == ["2.pt"]


class FailingStore(LocalDumpStore):
    """A store whose disk is full the first two times."""

    def __init__(self, template: str) -> None:
        super().__init__(template)
        self.failures_left = 2

    def publish(self, dump: Dump) -> PublishedDump:
        if self.failures_left:
            self.failures_left -= 1
            raise OSError(28, "No space left on device")
        return super().publish(dump)


async def test_a_full_disk_is_waited_for(installed: Installation) -> None:
    async with running(installed.config, FailingStore(installed.config.dump_path)) as daemon:
        await installed.send(keyed("run", 1, frames_of("run", 1, 1, shards(1))))
        await installed.dumps(1)

    assert daemon.stats.retries == 2
    installed.check("run", 1, shards(1))


async def test_a_record_that_alone_does_not_fit_into_memory_ends_the_daemon_with_a_sentence(
    installed: Installation,
) -> None:
    await installed.send(keyed("run", 1, frames_of("run", 1, 1, shards(1))))

    daemon = Daemon(replace(installed.config, max_resident_bytes=1000))
    with pytest.raises(AssemblerFullError, match="max_resident_bytes=1000"):
        await daemon.run()
    daemon.shutdown()

    async with running(installed.config):
        await installed.dumps(1)
    installed.check("run", 1, shards(1))
