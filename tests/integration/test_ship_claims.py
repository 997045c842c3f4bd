"""One shipper at a bundle, and bundles that kill shippers."""

import asyncio
import errno
import mmap
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.faults import Pipeline, consuming
from fixtures.installation import installation, until
from fixtures.shipping import closed, direct, large_shard, publish, ship_process, shipper, small_shard
from fixtures.topic import payload_in, read_until, shards_in
from rollcast.consumer.broker import Broker
from rollcast.consumer.difference import differences
from rollcast.producer.errors import SpoolError, UnusableBundleError
from rollcast.producer.shipper.claims import MAX_DEATHS, Claims
from rollcast.producer.shipper.config import ShipperConfig
from rollcast.producer.shipper.cut import cut, cut_slot
from rollcast.producer.shipper.opening import Opening
from rollcast.producer.spool import pages
from rollcast.producer.spool.folder import SpoolFolder
from rollcast.producer.spool.pages import require_readable
from rollcast.producer.spool.read import TENSORS_NAME, Bundle, check_tensors, read_bundle, read_closing_event
from rollcast.schemas import DpShard, Event, SamplePart, Topics
from rollcast.schemas.framing import encode


@pytest.fixture
def topics() -> Topics:
    return Topics(f"test-{uuid.uuid4().hex[:12]}")


def _config(broker: Broker, topics: Topics, compress_threads: int = 2) -> ShipperConfig:
    return ShipperConfig(
        bootstrap_servers=broker.bootstrap_servers,
        topics=topics,
        partitions=1,
        stop_with_trainers=True,
        compress_threads=compress_threads,
    )


def test_a_bundle_is_had_by_one_process_and_can_be_given_back(tmp_path: Path) -> None:
    ours, theirs = Claims(), Claims()
    bundle = tmp_path / "0-a1-dp0"
    bundle.mkdir()
    assert ours.take(bundle)
    assert not theirs.take(bundle)
    ours.give_back(bundle)
    ours.give_back(bundle)
    assert theirs.take(bundle)
    theirs.give_all_back()
    assert ours.deaths(bundle) == 0


def test_a_bundle_that_has_gone_cannot_be_had(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Claims().take(tmp_path / "0-a1-dp0")


def test_the_bundles_of_a_killed_process_show_it(tmp_path: Path) -> None:
    bundle = tmp_path / "0-a1-dp0"
    bundle.mkdir()
    program = f"""
import os, pathlib
from rollcast.producer.shipper.claims import Claims
assert Claims().take(pathlib.Path({str(bundle)!r}))
os.kill(os.getpid(), {signal.SIGKILL})
"""
    for deaths in (1, 2, 3):
        assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
        assert Claims().deaths(bundle) == deaths
    assert Claims().suspicion(bundle) == 1


async def test_a_bundle_that_another_shipper_has_on_its_way_is_left_to_it(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    publish(tmp_path, 0, 1)
    (_, taken), _ = SpoolFolder(tmp_path).bundles()
    others = Claims()
    assert others.take(taken)
    with ship_process(
        f"--spool={tmp_path}",
        f"--bootstrap={broker.bootstrap_servers}",
        f"--topic-prefix={topics.prefix}",
        "--stop-with-trainers",
    ) as ship:
        events = await read_until(broker.bootstrap_servers, topics.records, closed(1))
        assert not shards_in(events, 0)
        # It is removed only after Kafka has answered, so later than others can read it.
        await until(lambda: [path for _, path in SpoolFolder(tmp_path).bundles()] == [taken])
        others.give_all_back()
        assert ship.wait(30) == 0
    events = await read_until(broker.bootstrap_servers, topics.records, closed(0, 1))
    for rollout_id in (0, 1):
        assert not differences(payload_in(events, rollout_id), direct(rollout_id))


def _kill_shippers(bundle: Path, times: int) -> None:
    (bundle / "shipping").write_bytes(b"." * times)


async def test_a_bundle_at_which_shippers_keep_dying_is_set_aside_announced_and_may_be_moved_back(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    publish(tmp_path, 0, 1)
    (_, guilty), _ = SpoolFolder(tmp_path).bundles()
    _kill_shippers(guilty, MAX_DEATHS)
    with shipper(tmp_path, _config(broker, topics)) as ship:
        await ship.run()
    assert (ship.stats.set_aside_bundles, ship.stats.shipped_bundles) == (1, 1)
    events = await read_until(broker.bootstrap_servers, topics.records, closed(0, 1))
    (dropped,) = shards_in(events, 0)
    assert f"{MAX_DEATHS} shippers died while it was on its way" in (dropped.dropped_reason or "")
    assert not differences(payload_in(events, 1), direct(1))
    (reason,) = tmp_path.rglob("reason.txt")
    assert "shippers died" in reason.read_text()
    reason.parent.rename(guilty)
    with shipper(tmp_path, _config(broker, topics)) as ship:
        await ship.run()
    assert (ship.stats.set_aside_bundles, ship.stats.shipped_bundles) == (0, 1)


async def test_a_bundle_at_which_some_shippers_died_goes_last_and_arrives(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    publish(tmp_path, 0, 1, 2)
    (_, first), (_, second), _ = SpoolFolder(tmp_path).bundles()
    _kill_shippers(first, MAX_DEATHS - 1)
    # So many may have been killed by whoever restarts machines.
    _kill_shippers(second, 2)
    with shipper(tmp_path, _config(broker, topics)) as ship:
        await ship.run()
    events = await read_until(broker.bootstrap_servers, topics.records, closed(0, 1, 2))
    assert [event.rollout_id for event in events if isinstance(event, DpShard)] == [1, 2, 0]
    assert not differences(payload_in(events, 0), direct(0))


async def test_the_next_bundle_is_opened_while_one_is_sent(tmp_path: Path) -> None:
    publish(tmp_path, 0, 1)
    (_, first), (_, second) = SpoolFolder(tmp_path).bundles()
    ours, theirs = Claims(), Claims()
    opening = Opening(ours)
    await opening.open(first, second)
    await until(lambda: ours.deaths(second) == 1)
    assert not theirs.take(second)
    assert opening.deaths(second) == 0
    opened = await opening.open(second, None)
    assert opened is not None
    assert opened.shard.rollout_id == 1
    await opening.end()
    ours.give_all_back()
    assert theirs.take(second)


@pytest.mark.parametrize("suspect", [0, 1])
async def test_no_bundle_is_opened_beside_one_at_which_a_shipper_has_died(tmp_path: Path, suspect: int) -> None:
    publish(tmp_path, 0, 1)
    paths = [path for _, path in SpoolFolder(tmp_path).bundles()]
    _kill_shippers(paths[suspect], 1)
    opening = Opening(Claims())
    assert opening.deaths(paths[0]) == (suspect == 0)
    await opening.open(paths[0], paths[1])
    await opening.end()
    assert Claims().take(paths[1])


async def test_a_bundle_that_was_opened_ahead_in_vain_is_shipped_by_the_next_client(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    publish(tmp_path, 0, 1)
    (_, first), (_, second) = SpoolFolder(tmp_path).bundles()
    ours = Claims()
    opening = Opening(ours)
    await opening.open(first, second)
    # As the shipper does when its client has failed: nobody waits for what was opened ahead.
    await opening.end()
    ours.give_all_back()
    assert Claims().deaths(second) == 0
    with shipper(tmp_path, _config(broker, topics)) as ship:
        await ship.run()
    assert ship.stats.shipped_bundles == 2


class _SlowDisk:
    """A disk that gives nothing back until it is let go; reading begins with a look at it.

    Attributes:
        looked: number of looks.
        begun: set at the first one.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looked, self.begun, self._gives = 0, threading.Event(), threading.Event()
        monkeypatch.setattr("rollcast.producer.spool.read.require_readable", self._look)

    def _look(self, data: bytes | memoryview) -> None:
        self.looked += 1
        self.begun.set()
        assert self._gives.wait(30)
        require_readable(data)

    def let_go(self) -> None:
        self._gives.set()

    @contextmanager
    def let_go_at_the_end(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.let_go()


async def test_a_bundle_that_comes_from_a_slow_disk_is_given_up_in_its_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, 0, shard=large_shard)
    ((_, path),) = SpoolFolder(tmp_path).bundles()
    disk = _SlowDisk(monkeypatch)
    with ThreadPoolExecutor(1) as threads, disk.let_go_at_the_end():
        slots = cut(read_bundle(path), 900_000, threads, max_ahead_bytes=1)
        assert (await anext(slots)).frames, "though the disk has given only that much back"
        await until(disk.begun.is_set)
        closing = asyncio.create_task(slots.aclose())
        await asyncio.sleep(0)
        assert not closing.done(), "whoever has the bundle next must have it alone"
        disk.let_go()
        await closing
    assert disk.looked == 1, "not at the rest of it"


async def test_a_shipper_that_is_told_to_stop_while_a_disk_gives_nothing_back_leaves_no_mark_of_a_death(
    broker: Broker, topics: Topics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, 0, 1)
    paths = [path for _, path in SpoolFolder(tmp_path).bundles()]
    disk = _SlowDisk(monkeypatch)
    with disk.let_go_at_the_end(), shipper(tmp_path, _config(broker, topics)) as ship:
        running = asyncio.create_task(ship.run())
        await until(disk.begun.is_set)
        assert Claims().deaths(paths[0]) == 1
        # As a sidecar does, which does not wait for a disk.
        while not running.done():
            running.cancel()
            await asyncio.wait({running}, timeout=0.1)
        assert [Claims().deaths(path) for path in paths] == [0, 0]


async def test_a_bundle_for_which_memory_is_short_goes_last_and_arrives(
    broker: Broker, topics: Topics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, 0, 1)
    failures = iter([MemoryError()])

    def encode_with_little_memory(event: SamplePart) -> bytes:
        if (error := next(failures, None)) is not None:
            raise error
        return encode(event)

    monkeypatch.setattr("rollcast.producer.shipper.cut.encode", encode_with_little_memory)
    with shipper(tmp_path, _config(broker, topics)) as ship:
        await ship.run()
    assert ship.stats.shipped_bundles == 2
    events = await read_until(broker.bootstrap_servers, topics.records, closed(0, 1))
    assert [event.rollout_id for event in events if isinstance(event, DpShard)] == [1, 0]
    assert not differences(payload_in(events, 0), direct(0))


async def test_a_bundle_of_which_a_disk_does_not_give_a_page_back_goes_last_and_arrives(
    broker: Broker, topics: Topics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, 0, 1)
    disk = _SlowDisk(monkeypatch)
    failures = iter([OSError(errno.EIO, "its tensor file cannot be read from the disk")])

    def bring_in(data: bytes | memoryview) -> None:
        disk.let_go()
        if (error := next(failures, None)) is not None:
            raise error
        require_readable(data)

    # While the check of the whole has not come so far.
    monkeypatch.setattr("rollcast.producer.shipper.cut.require_readable", bring_in)
    with disk.let_go_at_the_end(), shipper(tmp_path, _config(broker, topics)) as ship:
        await ship.run()
    events = await read_until(broker.bootstrap_servers, topics.records, closed(0, 1))
    assert [event.rollout_id for event in events if isinstance(event, DpShard)] == [1, 0]
    assert not differences(payload_in(events, 0), direct(0))


def test_a_tensor_file_cut_short_while_it_is_mapped_is_an_error_and_no_signal(tmp_path: Path) -> None:
    publish(tmp_path, 0, shard=large_shard)
    ((_, path),) = SpoolFolder(tmp_path).bundles()
    bundle = read_bundle(path)
    assert cut_slot(bundle.slots[0], 900_000).frames
    os.truncate(path / TENSORS_NAME, 10_000_000)
    with pytest.raises(SpoolError, match="cut short"):
        cut_slot(bundle.slots[-2], 900_000)


@pytest.mark.skipif(
    tuple(int(number) for number in os.uname().release.split(".")[:2]) < (5, 14),
    reason="the kernel cannot look at pages without using them",
)
def test_pages_that_cannot_be_read_are_an_error_and_no_signal(tmp_path: Path) -> None:
    file = tmp_path / "tensors"
    file.write_bytes(bytes(100_000))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        require_readable(mapping[:0])
        with memoryview(mapping) as whole, whole[50_001:] as end, whole[:30_000] as begin:
            require_readable(end)
            os.truncate(file, 40_000)
            require_readable(begin)
            with pytest.raises(SpoolError, match="cut short"):
                require_readable(end)


async def test_a_tensor_file_cut_short_on_its_way_is_set_aside_announced_and_ends_nobody(
    broker: Broker, topics: Topics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, 0, shard=large_shard)
    publish(tmp_path, 1)
    (_, path), _ = SpoolFolder(tmp_path).bundles()
    looked, is_checked = 0, threading.Event()
    look = pages.require_whole

    def check(bundle: Bundle, given_up: threading.Event) -> None:
        try:
            check_tensors(bundle, given_up)
        finally:
            is_checked.set()

    def cut_short_in_the_middle(data: bytes | memoryview) -> None:
        nonlocal looked
        looked += 1
        if looked == 10:
            assert is_checked.wait(30)
            os.truncate(path / TENSORS_NAME, 1_000)
        look(data)

    monkeypatch.setattr("rollcast.producer.shipper.cut.check_tensors", check)
    monkeypatch.setattr("rollcast.producer.shipper.cut.require_whole", cut_short_in_the_middle)
    # One thread, and the check is over: what another thread is reading just then would still end the process; the next
    # one finds the file short.
    with shipper(tmp_path, _config(broker, topics, compress_threads=1)) as ship:
        await ship.run()
    assert (ship.stats.set_aside_bundles, ship.stats.shipped_bundles) == (1, 1)
    events = await read_until(broker.bootstrap_servers, topics.records, closed(0, 1))
    assert "cut short" in (shards_in(events, 0)[0].dropped_reason or "")


def _flip_the_last_bit(bundle: Path) -> None:
    content = bytearray((bundle / TENSORS_NAME).read_bytes())
    content[-1] ^= 1
    (bundle / TENSORS_NAME).write_bytes(content)


def _parts(events: Sequence[Event], rollout_id: int) -> list[SamplePart]:
    return [event for event in events if isinstance(event, SamplePart) and event.rollout_id == rollout_id]


async def test_a_bundle_whose_tensors_a_disk_has_damaged_is_set_aside_and_announced(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    publish(tmp_path, 0, 1)
    _, (_, damaged) = SpoolFolder(tmp_path).bundles()
    _flip_the_last_bit(damaged)
    with pytest.raises(UnusableBundleError) as unusable:
        check_tensors(read_bundle(damaged), threading.Event())
    assert unusable.value.shard == read_closing_event(damaged)
    with shipper(tmp_path, _config(broker, topics)) as ship:
        await ship.run()
    assert (ship.stats.set_aside_bundles, ship.stats.shipped_bundles) == (1, 1)
    events = await read_until(broker.bootstrap_servers, topics.records, closed(0, 1), timeout_s=20)
    assert "is damaged" in (shards_in(events, 1)[0].dropped_reason or "")
    assert not differences(payload_in(events, 0), direct(0))


async def test_a_damage_found_after_all_parts_are_in_kafka_drops_the_rollout_and_no_other(
    broker: Broker, topics: Topics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = tmp_path / "spool"
    publish(spool, 0, 1)
    (_, damaged), _ = SpoolFolder(spool).bundles()
    _flip_the_last_bit(damaged)
    slots = len(read_bundle(damaged).slots)
    disk = _SlowDisk(monkeypatch)
    made = installation(broker.bootstrap_servers, tmp_path / "dumps")
    pipe = Pipeline(installation=replace(made, config=replace(made.config, topics=topics)), spool=spool)
    async with consuming(pipe, 1) as daemon:
        with disk.let_go_at_the_end(), shipper(spool, _config(broker, topics)) as ship:
            running = asyncio.create_task(ship.run())
            await until(lambda: daemon.stats.records == slots)
            assert not ship.stats.set_aside_bundles
            disk.let_go()
            await running
        await pipe.dumps_are_there(1)
    assert daemon.stats.dropped == 1
    assert (ship.stats.set_aside_bundles, ship.stats.shipped_bundles) == (1, 1)
    events = await read_until(broker.bootstrap_servers, topics.records, closed(0, 1))
    (mark,) = shards_in(events, 0)
    assert events.index(mark) > max(map(events.index, _parts(events, 0)))
    assert "is damaged" in (mark.dropped_reason or "")
    assert not list(pipe.dump(0).parent.glob("0*")), "of what has come of it no dump may be made"
    pipe.check(1, shard=small_shard)


_NEVER_CHECKED = """
import sys, time
from rollcast.producer.shipper.cli import main
from rollcast.producer.spool import read

read.require_readable = lambda data: time.sleep(60)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("is_damaged", [True, False])
async def test_a_shipper_killed_when_all_is_sent_and_not_all_checked_leaves_the_bundle_to_the_next_one(
    broker: Broker, topics: Topics, tmp_path: Path, is_damaged: bool
) -> None:
    publish(tmp_path, 0)
    ((_, path),) = SpoolFolder(tmp_path).bundles()
    slots = len(read_bundle(path).slots)
    if is_damaged:
        _flip_the_last_bit(path)
    options = (f"--spool={tmp_path}", f"--bootstrap={broker.bootstrap_servers}", f"--topic-prefix={topics.prefix}")
    command = [sys.executable, "-c", _NEVER_CHECKED, *options]
    with subprocess.Popen(command) as first:  # noqa: ASYNC220  # a fork, no wait
        try:
            await read_until(broker.bootstrap_servers, topics.records, lambda events: len(_parts(events, 0)) == slots)
        finally:
            first.kill()
    assert Claims().deaths(path) == 1
    with shipper(tmp_path, _config(broker, topics)) as ship:
        await ship.run()
    assert (ship.stats.set_aside_bundles, ship.stats.shipped_bundles) == ((1, 0) if is_damaged else (0, 1))
    events = await read_until(broker.bootstrap_servers, topics.records, closed(0))
    (event,) = shards_in(events, 0)
    if is_damaged:
        assert "is damaged" in (event.dropped_reason or "")
    else:
        assert len(_parts(events, 0)) == 2 * slots
        assert not differences(payload_in(events, 0), direct(0))


def test_a_kernel_that_cannot_look_at_pages_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class OldKernel:
        def madvise(self, *_: object) -> int:
            return -1

    monkeypatch.setattr(pages, "_libc", OldKernel())
    monkeypatch.setattr("ctypes.get_errno", lambda: errno.EINVAL)
    require_readable(b"some bytes")


def test_a_bundle_that_only_waits_for_kafka_is_not_blamed_for_the_death_of_its_shipper(tmp_path: Path) -> None:
    publish(tmp_path, 0)
    ((_, path),) = SpoolFolder(tmp_path).bundles()
    claims = Claims()
    assert claims.take(path)
    assert claims.deaths(path) == 1, "so it stands there until the danger is over"
    claims.survived(path)
    assert claims.deaths(path) == 0
    claims.give_back(path)
    assert claims.deaths(path) == 0
