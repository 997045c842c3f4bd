"""The spool's quota: room is waited for within a bound, then the rollout is dropped whole, counted and announced."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.rollouts import whole_shard
from rollcast.producer import Publisher, PublisherConfig, PublisherStats, PublishResult, PublishStatus
from rollcast.producer.errors import SpoolFullError
from rollcast.producer.quota import Quota
from rollcast.producer.spool.folder import SpoolFolder
from rollcast.producer.spool.read import read_bundle
from rollcast.producer.spool.usage import SpoolUsage, measure_spool


def _config(spool: Path, **options: Any) -> PublisherConfig:
    settings: dict[str, Any] = {"run_id": "run/1", "bootstrap_servers": "127.0.0.1:1", "start_shipper": False}
    return PublisherConfig(spool_dir=spool, **(settings | options))


def _publisher(spool: Path, **options: Any) -> Publisher:
    return Publisher(_config(spool, **options))


def _publish(publisher: Publisher, rollout_id: int) -> PublishResult:
    return publisher.publish(rollout_id, whole_shard(rollout_id, 0, 1))


def _statuses(publisher: Publisher, count: int) -> list[str]:
    return [str(_publish(publisher, rollout_id).status) for rollout_id in range(count)]


def test_the_number_of_bundles_is_bounded_and_the_marks_of_drops_do_not_count(tmp_path: Path) -> None:
    publisher = _publisher(tmp_path, max_spool_bundles=2)
    assert _statuses(publisher, 5) == ["published", "published", "dropped", "dropped", "dropped"]
    publisher.close(0.5)
    spool = SpoolFolder(tmp_path)
    reasons = [read_bundle(path).shard.dropped_reason for _, path in spool.bundles()]
    assert reasons == [None, None, *["rank 0 (shard 0): spool full"] * 3]
    assert measure_spool(tmp_path).bundles == 2


def test_a_new_trainer_counts_what_the_spool_holds_already(tmp_path: Path) -> None:
    first = _publisher(tmp_path, max_spool_bundles=2)
    assert _statuses(first, 2) == ["published", "published"]
    first.close(0.5)
    second = _publisher(tmp_path, max_spool_bundles=2)
    assert second.stats.spool_bundles == 2
    assert second.stats.spool_bytes == measure_spool(tmp_path).size > 0
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
    quota = Quota(tmp_path, _config(tmp_path, max_spool_bundles=2))
    spool = SpoolFolder(tmp_path)
    for name in ("7-a1-dp0", "7-a1-dp1"):
        (spool.run_folder("run/1") / f".{name}.filling").mkdir(parents=True)
        (spool.run_folder("run/1") / f".{name}.filling" / "tensors.safetensors").write_bytes(bytes(100))
    quota.measure()
    assert quota.held() == SpoolUsage(200, 2)
    run = f"{spool.run_folder('run/1')}/"
    quota.await_room(100, 2, f"{run}.7-a1-dp", 0.0)
    with pytest.raises(SpoolFullError, match="holds 2 bundles with 200 bytes"):
        quota.await_room(100, 1, f"{run}.8-a1-dp", 0.0)


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
        assert measure_spool(tmp_path) == SpoolUsage(100, 1)
