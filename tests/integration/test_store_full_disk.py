"""Full and failing disks: what was there stays, what was begun goes, and the next try succeeds."""

import errno
import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fixtures.crashing import store as store_of_several
from fixtures.frames import ShardSource, frames_of
from fixtures.installation import Installation, installation, keyed, running, shards, until
from fixtures.small_disk import small_file_system
from fixtures.stored import KEY, MISSING, dump, payload_of
from rollcast.consumer.broker import Broker
from rollcast.consumer.store import LocalDumpStore
from rollcast.consumer.store.files import TEMP_SUFFIX
from rollcast.consumer.store.steps import Step
from rollcast.consumer.topics import prepare_topics
from rollcast.consumer.verification import verify

SIZE = 4 * 1024 * 1024


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 MB."""
    with small_file_system(tmp_path / "disk", SIZE) as disk:
        yield disk


def temporaries(folder: Path) -> list[Path]:
    return list(folder.rglob(f".*{TEMP_SUFFIX}"))


def test_on_a_disk_that_is_really_full_nothing_is_lost_and_with_room_it_goes_on(small_disk: Path) -> None:
    store = LocalDumpStore(f"{small_disk}/{{run_id}}/{{rollout_id}}.pt")
    store.open()
    before = store.publish(dump(attempt=1))
    filler = small_disk / "filler"
    filler.write_bytes(bytes(SIZE // 2))
    large = dump(attempt=2, elements=SIZE // 16)

    with pytest.raises(OSError, match="No space left") as caught:
        store.publish(large)

    assert caught.value.errno == errno.ENOSPC
    assert temporaries(small_disk) == []
    assert store.published(KEY) == before
    filler.unlink()
    assert store.publish(large).manifest.id.attempt == 2
    assert all(verdict.problem is None for verdict in verify(small_disk))


def test_what_a_full_disk_did_not_take_is_given_back_at_once(small_disk: Path) -> None:
    store = LocalDumpStore(f"{small_disk}/{{run_id}}/{{rollout_id}}.pt")
    too_large = dump(elements=SIZE // 4)
    tensor = weakref.ref(payload_of(too_large)["samples"][0]["entropy"])
    gc.disable()
    try:
        with suppress(OSError):
            store.publish(too_large)
        del too_large
        assert tensor() is None
    finally:
        gc.enable()


def _zeros(elements: int) -> list[ShardSource]:
    data = {"response_lengths": [1], "image": [torch.zeros(elements, dtype=torch.uint8)], "partition": [0]}
    return [ShardSource(rank=3, data_parallel_rank=0, rollout_data=data)]


async def test_scratch_files_that_are_kept_to_be_used_again_keep_no_dump_from_a_disk(
    broker: Broker, tmp_path: Path
) -> None:
    mib = 2**20
    with small_file_system(tmp_path / "disk", 200 * mib) as disk:
        installed = installation(broker.bootstrap_servers, disk)
        await prepare_topics(installed.config)
        async with running(installed.config) as daemon:
            # The first leaves a dump of 64 MiB and a spare file; the second needs 48 MiB twice.
            for rollout_id, elements in ((1, 64 * mib), (2, 48 * mib)):
                frames = frames_of("run", 1, rollout_id, _zeros(elements))
                await installed.send(keyed("run", rollout_id, frames))
                await installed.dumps(rollout_id)
            assert daemon.stats.retries == 1
        installed.check("run", 2, _zeros(48 * mib))


async def test_a_daemon_on_a_full_disk_says_so_holds_the_offset_and_goes_on_with_room(
    broker: Broker, small_disk: Path, tmp_path: Path
) -> None:
    installed: Installation = installation(broker.bootstrap_servers, small_disk)
    # The dump alone fits when the disk has room again.
    config = replace(installed.config, scratch_dir=str(tmp_path / "scratch"))
    await prepare_topics(config)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(SIZE - 128 * 1024))

    async with running(config) as daemon:
        await installed.send(keyed("run", 1, frames_of("run", 1, 1, shards(1, tokens=20_000))))
        await until(lambda: bool(daemon.failing))
        failing = daemon.failing
        assert temporaries(small_disk) == []
        filler.unlink()
        await installed.dumps(1)
        await until(lambda: daemon.stats.dumps == 1)
        assert not daemon.failing

    ((what, problem),) = failing.items()
    assert what == "write the dump of run 'run' attempt 1 rollout 1"
    assert "No space left" in problem
    installed.check("run", 1, shards(1, tokens=20_000))


@pytest.mark.parametrize("step", [step for step in Step if step not in (Step.RETIRED, Step.REMOVED)])
def test_a_disk_that_fails_at_any_step_costs_a_try_and_no_more(tmp_path: Path, step: Step) -> None:
    healthy = store_of_several(tmp_path)
    healthy.publish(dump(ranks=(0, 3)))
    healthy.publish(dump(attempt=2, ranks=(0, 3), missing=MISSING))

    def fail(reached: Step) -> None:
        if reached is step:
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        store_of_several(tmp_path, fail).publish(dump(attempt=2, ranks=(0, 3)))

    assert temporaries(tmp_path) == []
    published = healthy.publish(dump(attempt=2, ranks=(0, 3)))
    assert healthy.published(KEY) == published
    assert published.manifest.id.attempt == 2
    verdicts = list(verify(tmp_path))
    assert [verdict.problem for verdict in verdicts if verdict.problem is not None] == []
    sound = {verdict.path.name for verdict in verdicts}
    assert sound >= {"7_rank.attempt-1.pt.manifest.json", "7_rank.pt.manifest.json"}
