"""The spool's quota: room is waited for within a bound, then the rollout is dropped whole, counted and announced."""

import json
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fixtures.rollouts import whole_shard
from rollcast.producer import Publisher, PublisherConfig, PublisherStats, PublishResult, PublishStatus
from rollcast.producer.errors import SpoolFullError
from rollcast.producer.quota import Quota
from rollcast.producer.spool.folder import BundleName, SpoolFolder
from rollcast.producer.spool.read import read_bundle
from rollcast.producer.spool.usage import SpoolMeter, SpoolUsage


def _config(spool: Path, **options: Any) -> PublisherConfig:
    settings: dict[str, Any] = {"run_id": "run/1", "bootstrap_servers": "127.0.0.1:1", "start_shipper": False}
    return PublisherConfig(spool_dir=spool, **(settings | options))


def _publisher(spool: Path, **options: Any) -> Publisher:
    return Publisher(_config(spool, **options))


def _publish(publisher: Publisher, rollout_id: int) -> PublishResult:
    return publisher.publish(rollout_id, whole_shard(rollout_id, 0, 1))


def _name(text: str) -> BundleName:
    name = BundleName.parse(text)
    assert name is not None
    return name


def _fill(folder: Path, size: int = 100) -> None:
    folder.mkdir(parents=True)
    (folder / "tensors.safetensors").write_bytes(bytes(size))


def _held(spool: Path) -> SpoolUsage:
    return SpoolMeter(spool).measure().usage


def _statuses(publisher: Publisher, count: int) -> list[str]:
    return [str(_publish(publisher, rollout_id).status) for rollout_id in range(count)]


def test_the_number_of_bundles_is_bounded_and_the_marks_of_drops_do_not_count(tmp_path: Path) -> None:
    publisher = _publisher(tmp_path, max_spool_bundles=2)
    assert _statuses(publisher, 5) == ["published", "published", "dropped", "dropped", "dropped"]
    publisher.close(0.5)
    spool = SpoolFolder(tmp_path)
    reasons = [read_bundle(path).shard.dropped_reason for _, path in spool.bundles()]
    assert reasons[:2] == [None, None]
    for reason in reasons[2:]:
        assert reason is not None
        assert reason.startswith("rank 0 (shard 0): spool full: the spool ")
        assert "max_spool_bundles is 2" in reason
    held = _held(tmp_path)
    assert (held.bundles, held.marks) == (2, 3)


def test_a_new_trainer_counts_what_the_spool_holds_already(tmp_path: Path) -> None:
    first = _publisher(tmp_path, max_spool_bundles=2)
    assert _statuses(first, 2) == ["published", "published"]
    first.close(0.5)
    second = _publisher(tmp_path, max_spool_bundles=2)
    assert second.stats.spool_bundles == 2
    assert second.stats.spool_bytes == _held(tmp_path).size > 0
    assert _publish(second, 2).status is PublishStatus.DROPPED
    second.close(0.2)


def test_publish_waits_for_the_shipper_to_make_room(tmp_path: Path) -> None:
    publisher = _publisher(tmp_path, max_spool_bundles=1, block_up_to_s=20)
    assert _publish(publisher, 0).status is PublishStatus.PUBLISHED
    spool = SpoolFolder(tmp_path)

    def ship() -> None:
        while not (bundles := spool.bundles()):
            time.sleep(0.01)
        time.sleep(0.3)
        spool.retire(bundles[0][1])

    shipper = threading.Thread(target=ship)
    shipper.start()
    result = _publish(publisher, 1)
    shipper.join()
    publisher.close(0.2)
    assert result.status is PublishStatus.PUBLISHED
    assert 0.2 < result.room_s < 15
    assert result.stall_s >= result.prepare_s + result.room_s + result.agree_s + result.copy_s > result.room_s


def test_a_full_spool_delays_training_by_the_bound_and_no_more(tmp_path: Path) -> None:
    publisher = _publisher(tmp_path, max_spool_bundles=1, block_up_to_s=0.5)
    assert _publish(publisher, 0).status is PublishStatus.PUBLISHED
    result = _publish(publisher, 1)
    publisher.close(0.2)
    assert result.status is PublishStatus.DROPPED
    assert result.reason is not None
    assert "max_spool_bundles is 1" in result.reason
    assert 0.5 <= result.room_s < 5


def test_what_is_larger_than_the_whole_quota_is_not_waited_for(tmp_path: Path) -> None:
    publisher = _publisher(tmp_path, max_spool_bytes=10, block_up_to_s=25)
    result = _publish(publisher, 0)
    publisher.close(0.2)
    assert result.status is PublishStatus.DROPPED
    assert result.stall_s < 10


def test_bundles_that_peers_have_begun_take_no_room_from_their_own_rollout(tmp_path: Path) -> None:
    spool = SpoolFolder(tmp_path)
    for name in ("7-a1-dp0", "7-a1-dp1"):
        _fill(spool.filling("run/1", _name(name)))
    quota = Quota(tmp_path, _config(tmp_path, max_spool_bundles=2))
    assert quota.held == SpoolUsage(200, 2)
    quota.await_room(100, 2, spool.rollout_key("run/1", _name("7-a1-dp0")), 0.0)
    with pytest.raises(SpoolFullError, match="holds 2 bundles with 200 bytes"):
        quota.await_room(100, 1, spool.rollout_key("run/1", _name("8-a1-dp0")), 0.0)


def test_bundles_that_are_added_while_the_spool_is_measured_are_counted_once(tmp_path: Path) -> None:
    spool = SpoolFolder(tmp_path)
    _fill(spool.filling("run/1", _name("7-a1-dp0")))
    # Measured when one of two peers has begun its bundle, which is counted when both have.
    quota = Quota(tmp_path, _config(tmp_path))
    _fill(spool.filling("run/1", _name("7-a1-dp1")))
    quota.add(spool.rollout_key("run/1", _name("7-a1-dp0")), SpoolUsage(200, 2))
    assert quota.held == SpoolUsage(200, 2)
    for name in ("7-a1-dp0", "7-a1-dp1"):
        spool.filling("run/1", _name(name)).rename(spool.committed("run/1", _name(name)))
    time.sleep(0.1)
    quota.measure()
    assert quota.held == SpoolUsage(200, 2)


def test_a_publish_into_a_full_spool_lists_no_folder_on_the_training_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = _publisher(tmp_path, max_spool_bundles=2)
    assert _statuses(publisher, 2) == ["published", "published"]
    listing: list[str] = []
    scandir = os.scandir

    def noting(path: Any) -> Any:
        listing.append(threading.current_thread().name)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", noting)
    results = [_publish(publisher, rollout_id) for rollout_id in range(2, 20)]
    monkeypatch.undo()
    publisher.close(0.2)
    assert {result.status for result in results} == {PublishStatus.DROPPED}
    assert "MainThread" not in listing


def test_a_trainer_that_publishes_first_after_a_while_does_not_go_by_what_the_spool_held_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _publisher(tmp_path, max_spool_bundles=1)
    assert _publish(first, 0).status is PublishStatus.PUBLISHED
    first.close(0.5)
    monkeypatch.setattr("rollcast.producer.quota._PAUSE_PER_WALK", 0)
    second = _publisher(tmp_path, max_spool_bundles=1)
    assert second.stats.spool_bundles == 1
    spool = SpoolFolder(tmp_path)
    spool.retire(spool.bundles()[0][1])
    monkeypatch.setattr("rollcast.producer.quota._OVERDUE_S", 0.0)
    assert _publish(second, 1).status is PublishStatus.PUBLISHED
    second.close(0.2)


def test_the_stats_tell_what_the_spool_holds_when_they_are_asked_without_a_publish_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _publisher(tmp_path)
    assert _publish(first, 0).status is PublishStatus.PUBLISHED
    first.close(0.2)
    monkeypatch.setattr("rollcast.producer.quota._PAUSE_PER_WALK", 0)
    monkeypatch.setattr("rollcast.producer.quota._OVERDUE_S", 1_000.0)
    second = _publisher(tmp_path)
    threads = {*threading.enumerate()}
    before = second.stats
    assert before.spool_bundles == 1
    spool = SpoolFolder(tmp_path)
    spool.retire(spool.bundles()[0][1])
    assert second.stats == before, "not measured each time"
    monkeypatch.setattr("rollcast.producer.quota._OVERDUE_S", 0.0)
    assert second.stats.spool_bundles == 0
    assert second.stats.spool_measured_at_ms >= before.spool_measured_at_ms
    assert threads.issuperset(threading.enumerate())
    second.close(0.2)


def test_what_is_committed_is_looked_into_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    for number in range(50):
        _fill(run / f"{number}-a1-dp0")
    meter = SpoolMeter(tmp_path)
    assert meter.measure().usage == SpoolUsage(5000, 50)
    listed: list[str] = []
    scandir = os.scandir

    def noting(path: Any) -> Any:
        listed.append(Path(path).name)
        return scandir(path)

    shutil.rmtree(run / "0-a1-dp0")
    _fill(run / "50-a1-dp0")
    monkeypatch.setattr(os, "scandir", noting)
    assert meter.measure().usage == SpoolUsage(5000, 50)
    assert listed == [tmp_path.name, "run", "50-a1-dp0"]


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["fill", "commit", "mark", "retire"]), st.integers(0, 3), st.integers(1, 9)),
        max_size=12,
    )
)
def test_measuring_again_and_again_finds_what_measuring_once_does(
    tmp_path: Path, steps: list[tuple[str, int, int]]
) -> None:
    root = Path(tempfile.mkdtemp(dir=tmp_path))
    meter = SpoolMeter(root)
    for step, number, size in steps:
        filling, committed = root / "run" / f".{number}-a1-dp0.filling", root / "run" / f"{number}-a1-dp0"
        if step == "fill" and not filling.exists():
            _fill(filling, size)
        elif step == "commit" and filling.exists() and not committed.exists():
            filling.rename(committed)
        elif step == "mark" and not committed.exists():
            committed.mkdir(parents=True)
            (committed / "records.avro").write_bytes(bytes(size))
        elif step == "retire" and committed.exists():
            shutil.rmtree(committed)
        assert meter.measure().usage == _held(root)


def test_policy_loss_calls_share_the_quota_and_never_wait(tmp_path: Path) -> None:
    publisher = _publisher(tmp_path, max_spool_bundles=2, block_up_to_s=20)

    def call() -> dict[str, Any]:
        return {"response_lengths": [3], "train_log_probs": [torch.zeros(3)]}

    assert _publish(publisher, 0).status is PublishStatus.PUBLISHED
    results = [publisher.publish_alone("policy-loss", call) for _ in range(3)]
    publisher.close(0.5)
    assert [str(result.status) for result in results] == ["published", "dropped", "dropped"]
    assert max(result.stall_s for result in results) < 10
    stats = publisher.stats
    assert (stats.published, stats.dropped["spool_full"]) == (2, 2)


def _drops(stats: PublisherStats) -> dict[str, int]:
    return {reason: count for reason, count in stats.dropped.items() if count}


def test_the_stats_and_their_file_tell_what_was_published_and_dropped(tmp_path: Path) -> None:
    publisher = _publisher(tmp_path, max_spool_bundles=2)
    results = [_publish(publisher, rollout_id) for rollout_id in (0, 1, 2, 0)]
    results.append(publisher.publish(3, {**whole_shard(3, 0, 1), "tokens": []}))
    publisher.close(0.5)
    stats = publisher.stats
    assert (stats.spool_bundles, stats.spool_marks) == (2, 2)
    assert abs(stats.spool_measured_at_ms / 1000 - time.time()) < 60
    assert stats.published == 2
    assert stats.bytes == results[0].raw_bytes + results[1].raw_bytes
    assert stats.stall_seconds == pytest.approx(sum(result.stall_s for result in results))
    assert _drops(stats) == {"spool_full": 1, "repeated": 1, "bad_data": 1}
    (file,) = tmp_path.glob(".stats-*")
    assert file.name == ".stats-run%2F1-rank0.json"
    content = json.loads(file.read_text())
    assert abs(content.pop("updated_at_ms") / 1000 - time.time()) < 60
    assert content == {
        "run_id": "run/1",
        "rank": 0,
        "published": 2,
        "dropped": dict(stats.dropped),
        "bytes": stats.bytes,
        "stall_seconds": stats.stall_seconds,
    }
    assert content["dropped"]["not_copied"] == 0
    _publisher(tmp_path).close(0.1)
    assert not list(tmp_path.glob(".stats-*")), "the counters of the dead are swept"


def test_a_bundle_that_is_renamed_while_the_spool_is_measured_is_counted_all_the_same(tmp_path: Path) -> None:
    places = [tmp_path / "run" / name for name in (".0-a1-dp0.filling", "0-a1-dp0")]
    places[0].mkdir(parents=True)
    (places[0] / "tensors.safetensors").write_bytes(bytes(100))

    def rename() -> None:
        for turn in range(100):
            places[turn % 2].rename(places[1 - turn % 2])
            time.sleep(0.005)

    renaming = threading.Thread(target=rename)
    renaming.start()
    while renaming.is_alive():
        assert _held(tmp_path) == SpoolUsage(100, 1)
