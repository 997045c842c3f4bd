"""What may happen to a spool: a full disk, a removed folder, a second trainer, a lazy disk, a kill at a bad moment."""

import io
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.publishers import direct_payload, spool_publisher
from fixtures.ranks import run_to_its_end
from fixtures.rollouts import payload_in_spool, whole_shard
from fixtures.small_disk import small_file_system
from rollcast.consumer.difference import differences
from rollcast.producer import PublishStatus
from rollcast.producer.errors import SpoolError
from rollcast.producer.spool.folder import SpoolFolder
from rollcast.producer.spool.pool import TensorPool
from rollcast.producer.spool.read import check_tensors, read_bundle
from rollcast.producer.spool.trainers import living_trainers
from rollcast.producer.spool.write import commit_bundle

_FREE = 8 * 1024**2
_SHARD = 1024**2


def _await(condition: Callable[[], Any], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _megabyte_shard(fill: int) -> dict[str, Any]:
    return {
        "response_lengths": [4],
        "values": [torch.full((_SHARD,), fill, dtype=torch.uint8)[:4]],
        "x": _megabyte(fill),
    }


def _megabyte(fill: int) -> list[torch.Tensor]:
    return [torch.full((_SHARD,), fill, dtype=torch.uint8)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 8 MiB."""
    with small_file_system(tmp_path / "small", _FREE) as folder:
        yield folder


def test_a_full_disk_drops_rollouts_whole_and_announces_them_once_there_is_room(small_disk: Path) -> None:
    publisher = spool_publisher(small_disk)
    statuses = [publisher.publish(rollout_id, _megabyte_shard(rollout_id)).status for rollout_id in range(10)]
    assert statuses == [PublishStatus.PUBLISHED] * 7 + [PublishStatus.DROPPED] * 3
    spool = SpoolFolder(small_disk)
    # What is being committed must find its room.
    _await(lambda: len(spool.bundles()) >= 7)
    ballast = small_disk / "ballast"
    with ballast.open("wb") as file, pytest.raises(OSError, match="No space"):
        shutil.copyfileobj(io.BytesIO(bytes(_FREE)), file)
    assert publisher.publish(10, _megabyte_shard(10)).status is PublishStatus.DROPPED
    ballast.unlink()
    _await(lambda: len(spool.bundles()) == 11)
    for name, path in spool.bundles():
        bundle = read_bundle(path)
        assert (bundle.shard.dropped_reason is None) == (name.rollout_id < 7)
        for slot in bundle.slots[:-1]:
            values = [column.value for column in slot.columns if column.name == "x"]
            assert [bytes(value.data) for value in values] == [bytes([name.rollout_id]) * _SHARD]  # type: ignore[union-attr]  # a tensor
    spool.retire(spool.bundles()[0][1])
    assert publisher.publish(11, _megabyte_shard(11)).status is PublishStatus.PUBLISHED
    publisher.close(0.5)
    assert publisher.stats.dropped["spool_full"] == 4


def test_files_kept_for_later_are_never_what_fills_the_disk(small_disk: Path) -> None:
    pool = TensorPool(small_disk / "pool")
    for number in range(6):
        pool.take(small_disk / f"{number}", _SHARD)
    for number in range(6):
        pool.give(small_disk / f"{number}")
    pool.take(small_disk / "large", 7 * _SHARD)
    assert (small_disk / "large").stat().st_blocks * 512 == 7 * _SHARD
    pool.keep_spares(1, _SHARD)
    assert not pool.files(), "it would take more than half of what is left"


_HOLD_AND_STOP = """
import fcntl, os, signal, sys
file = open(sys.argv[1], "ab")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_process_stopped_with_the_lock_of_the_pool_delays_no_publish(tmp_path: Path) -> None:
    publisher = spool_publisher(tmp_path)
    (tmp_path / ".pool").mkdir()
    command = [sys.executable, "-c", _HOLD_AND_STOP, str(tmp_path / ".pool" / ".lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as stopped:
        assert stopped.stdout is not None
        assert stopped.stdout.readline() == b"held\n"
        result = publisher.publish(0, whole_shard(0, 0, 1))
        stopped.kill()
    publisher.close(0.3)
    assert result.status is PublishStatus.PUBLISHED
    assert result.stall_s < 5
    assert not differences(payload_in_spool(tmp_path, 0), direct_payload(0))


def test_a_pool_that_is_full_lets_the_oldest_file_go_and_a_small_bundle_takes_no_large_file(tmp_path: Path) -> None:
    pool = TensorPool(tmp_path / "pool", max_bytes=20 * _SHARD)
    for number, megabytes in enumerate((8, 6, 9)):
        pool.take(tmp_path / f"{number}", megabytes * _SHARD)
    for number in range(3):
        pool.give(tmp_path / f"{number}")
    assert [size // _SHARD for size, _ in pool.files()] == [6, 9]
    pool.take(tmp_path / "small", 1000)
    assert [size // _SHARD for size, _ in pool.files()] == [6, 9]
    pool.take(tmp_path / "like", 5 * _SHARD)
    assert [size // _SHARD for size, _ in pool.files()] == [9]


def test_a_spare_file_is_ready_for_the_next_rollout_while_the_shipper_is_slow(tmp_path: Path) -> None:
    publisher = spool_publisher(tmp_path)
    assert publisher.publish(0, _megabyte_shard(0)).status is PublishStatus.PUBLISHED
    pool = SpoolFolder(tmp_path).pool
    _await(pool.files)
    ((size, spare),) = pool.files()
    assert size >= _SHARD
    assert spare.stat().st_blocks * 512 >= size
    inode = spare.stat().st_ino
    assert publisher.publish(1, _megabyte_shard(1)).status is PublishStatus.PUBLISHED
    publisher.close(0.3)
    _, (_, second) = SpoolFolder(tmp_path).bundles()
    assert (second / "tensors.safetensors").stat().st_ino == inode


@pytest.mark.parametrize("byte", ["first", "last"])
def test_a_flipped_bit_on_the_disk_is_found_out(tmp_path: Path, byte: str) -> None:
    publisher = spool_publisher(tmp_path, fsync="background")
    publisher.publish(0, whole_shard(0, 0, 1))
    publisher.close(0.3)
    ((_, path),) = SpoolFolder(tmp_path).bundles()
    assert not differences(payload_in_spool(tmp_path, 0), direct_payload(0))
    file = path / "tensors.safetensors"
    content = bytearray(file.read_bytes())
    head = 8 + int.from_bytes(content[:8], "little")
    content[head if byte == "first" else -1] ^= 0x10
    file.write_bytes(content)
    with pytest.raises(SpoolError, match="is damaged: its digest"):
        check_tensors(read_bundle(path), threading.Event())


def test_a_spool_removed_under_the_trainer_switches_publishing_off_with_one_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = tmp_path / "spool"
    publisher = spool_publisher(spool)
    assert publisher.publish(0, whole_shard(0, 0, 1)).status is PublishStatus.PUBLISHED
    _await(lambda: SpoolFolder(spool).bundles())
    spool.rename(tmp_path / "elsewhere")
    results = [publisher.publish(rollout_id, whole_shard(1, 0, 1)) for rollout_id in (1, 2, 3)]
    assert [result.status for result in results] == [PublishStatus.DISABLED] * 3
    assert results[0].reason is not None
    assert "was removed or replaced" in results[0].reason
    publisher.close(0.2)
    assert caplog.text.count("publishing is switched off") == 1
    assert not spool.exists(), "nothing makes a second spool there"


def test_a_run_folder_that_was_removed_is_made_anew_for_the_shippers_of_its_destination(tmp_path: Path) -> None:
    publisher = spool_publisher(tmp_path)
    spool, destination = SpoolFolder(tmp_path), "rollcast@127.0.0.1:1"
    for rollout_id, data in enumerate((whole_shard(0, 0, 1), whole_shard(1, 0, 1), {"response_lengths": "none"})):
        shutil.rmtree(tmp_path / "run")
        status = PublishStatus.PUBLISHED if rollout_id < 2 else PublishStatus.DROPPED
        assert publisher.publish(rollout_id, data).status is status
        _await(lambda: spool.bundles())
        ((name, _),) = spool.bundles(destination)
        assert name.rollout_id == rollout_id
    spool.set_destination("run", "another")
    publisher.publish(3, whole_shard(3, 0, 1))
    publisher.close(0.2)
    assert len(spool.bundles("another")) == 2, "a trainer that has come since decides"


def test_a_second_trainer_with_the_same_attempt_is_refused_while_the_first_lives(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = spool_publisher(tmp_path, attempt=3)
    for attempt in (3, 2):
        second = spool_publisher(tmp_path, attempt=attempt)
        result = second.publish(0, whole_shard(1, 0, 1))
        assert result.status is PublishStatus.DISABLED
        assert result.reason is not None
        assert f"as attempt 3, so attempt {attempt} is refused" in result.reason
    assert first.publish(0, whole_shard(0, 0, 1)).status is PublishStatus.PUBLISHED
    first.close(0.3)
    assert not differences(payload_in_spool(tmp_path, 0), direct_payload(0))
    assert "publishing is switched off" in caplog.text
    again = spool_publisher(tmp_path, attempt=3)
    assert again.publish(1, whole_shard(1, 0, 1)).status is PublishStatus.PUBLISHED
    again.close(0.3)


def test_a_second_trainer_without_an_attempt_supersedes_the_first_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    future = 10**15
    first = spool_publisher(tmp_path, attempt=future)
    second = spool_publisher(tmp_path)
    assert f"as attempt {future}: this one supersedes it" in caplog.text
    for publisher in (first, second):
        assert publisher.publish(0, whole_shard(0, 0, 1)).status is PublishStatus.PUBLISHED
        publisher.close(0.3)
    spool = SpoolFolder(tmp_path)
    assert [name.attempt for name, _ in spool.bundles()] == [future, future + 1]
    assert not living_trainers(spool.run_folder("run"))


def test_a_bundle_left_by_the_same_attempt_stays_as_it_is_and_the_clash_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for seed in (0, 1):
        publisher = spool_publisher(tmp_path, attempt=3)
        assert publisher.publish(0, whole_shard(seed, 0, 1)).status is PublishStatus.PUBLISHED
        publisher.close(0.5)
    assert not differences(payload_in_spool(tmp_path, 0), direct_payload(0))
    assert "another trainer publishes with the same run_id and attempt" in caplog.text
    assert publisher.stats.dropped["not_committed"] == 1
    assert len(list((tmp_path / "run").glob("*-dp0"))) == 1


def _kill(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _publish_and_die(spool: Path, moment: str) -> None:
    def commit_and_die(*arguments: Any, **options: Any) -> None:
        commit_bundle(*arguments, **options)
        _kill()

    with pytest.MonkeyPatch.context() as patch:
        if moment == "in mid-publish":
            patch.setattr("rollcast.producer.publisher.copy_own", _kill)
        else:
            patch.setattr(
                "rollcast.producer.committer.commit_bundle", commit_and_die if moment == "after the commit" else _kill
            )
        spool_publisher(spool).publish(0, whole_shard(0, 0, 1))
        time.sleep(30)


@pytest.mark.parametrize("moment", ["in mid-publish", "before the commit", "after the commit"])
def test_a_trainer_killed_leaves_a_whole_bundle_or_none_and_the_next_start_says_so(
    tmp_path: Path, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert run_to_its_end(_publish_and_die, tmp_path, moment) == -signal.SIGKILL
    next_trainer = spool_publisher(tmp_path)
    assert not list(tmp_path.rglob("*.filling")), "what the dead one left half-filled is swept"
    if moment == "after the commit":
        assert not differences(payload_in_spool(tmp_path, 0), direct_payload(0))
    else:
        assert not SpoolFolder(tmp_path).bundles()
    assert ("lost with a trainer" in caplog.text) == (moment != "after the commit")
    next_trainer.close(0.1)
