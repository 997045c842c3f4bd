"""What `Publisher.close` promises: True where all of the rank is in Kafka, else what is missing, and who goes on."""

import os
import shutil
from pathlib import Path

import pytest

from fixtures.publishers import spool_publisher
from fixtures.rollouts import whole_shard
from fixtures.waiting import wait_until
from rollcast.producer import Publisher, PublishStatus
from rollcast.producer.spool.folder import SpoolFolder


def _publish(publisher: Publisher, rollout_id: int) -> PublishStatus:
    return publisher.publish(rollout_id, whole_shard(rollout_id, 0, 1)).status


def _ship(spool: SpoolFolder, count: int) -> None:
    wait_until(lambda: len(spool.bundles()) == count)
    for _, path in spool.bundles():
        spool.retire(path)


def test_close_is_true_when_everything_is_delivered_and_says_the_same_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = spool_publisher(tmp_path)
    assert _publish(publisher, 0) is PublishStatus.PUBLISHED
    _ship(SpoolFolder(tmp_path), 1)
    assert publisher.close(5)
    assert publisher.close(5)
    assert not caplog.records
    result = publisher.publish(1, whole_shard(1, 0, 1))
    assert (result.status, result.reason) == (PublishStatus.DISABLED, "the publisher is closed")


def test_close_of_a_publisher_that_was_given_nothing_is_true(tmp_path: Path) -> None:
    assert spool_publisher(tmp_path).close(0.1)


def test_close_is_false_where_a_rollout_was_dropped_and_tells_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = spool_publisher(tmp_path)
    assert _publish(publisher, 0) is PublishStatus.PUBLISHED
    assert publisher.publish(1, {"response_lengths": [2], "tokens": []}).status is PublishStatus.DROPPED
    _ship(SpoolFolder(tmp_path), 2)
    assert not publisher.close(5)
    assert not publisher.close(5)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == "not all of rank 0 of run 'run' is in Kafka: dropped were 1 (bad_data)"


@pytest.mark.parametrize("runs", [True, False], ids=["a shipper runs", "no shipper runs"])
def test_close_tells_what_waits_and_whether_anybody_goes_on_with_it(
    tmp_path: Path, runs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = spool_publisher(tmp_path, topic_prefix="demo")
    assert _publish(publisher, 0) is PublishStatus.PUBLISHED
    shipper = SpoolFolder(tmp_path).try_own("demo@127.0.0.1:1") if runs else None
    assert not publisher.close(0.2)
    if shipper is not None:
        shipper.close()
    assert f"waiting in {tmp_path} for Kafka at 127.0.0.1:1: 1 bundle, and " in caplog.text
    command = (
        f"if none comes up, start one: rollcast-ship --spool {tmp_path} --bootstrap 127.0.0.1:1 --topic-prefix demo"
    )
    assert ("the rollcast-ship that runs there goes on" in caplog.text) == runs
    assert (f"no rollcast-ship owns that spool now; {command}" in caplog.text) == (not runs)


def test_close_tells_marks_of_drops_from_bundles_that_wait(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    publisher = spool_publisher(tmp_path, max_spool_bundles=1)
    statuses = [_publish(publisher, rollout_id) for rollout_id in range(3)]
    assert statuses == [PublishStatus.PUBLISHED, PublishStatus.DROPPED, PublishStatus.DROPPED]
    assert not publisher.close(0.2)
    assert f"waiting in {tmp_path} for Kafka at 127.0.0.1:1: 1 bundle and 2 drop marks, and " in caplog.text


def test_close_calls_no_mark_of_a_drop_a_bundle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    publisher = spool_publisher(tmp_path)
    assert publisher.publish(0, {"response_lengths": [2], "tokens": []}).status is PublishStatus.DROPPED
    assert not publisher.close(0.2)
    assert "for Kafka at 127.0.0.1:1: 1 drop mark, and " in caplog.text
    assert "bundle" not in caplog.text


def test_close_is_false_where_a_bundle_was_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    publisher = spool_publisher(tmp_path)
    assert _publish(publisher, 0) is PublishStatus.PUBLISHED
    spool = SpoolFolder(tmp_path)
    wait_until(lambda: bool(spool.bundles()))
    spool.set_aside(spool.bundles()[0][1], "it is poison")
    assert not publisher.close(5)
    assert f"cannot be shipped: 1 bundle; {tmp_path / '.poison'} has them" in caplog.text


def test_close_is_false_where_a_peer_is_still_filling_and_takes_its_bound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollcast.producer.background._EXIT_FLUSH_S", 0.3)
    monkeypatch.setattr("rollcast.producer.committer.is_filled", lambda *_: False)
    publisher = spool_publisher(tmp_path, commit_timeout_s=5)
    assert _publish(publisher, 0) is PublishStatus.PUBLISHED
    assert not publisher.close(0.1)
    assert "not committed yet, and lost if this process ends: 1 bundle" in caplog.text
    assert publisher.stats.published == 0


def test_close_is_false_where_publishing_was_switched_off(tmp_path: Path) -> None:
    publisher = spool_publisher(tmp_path / "spool")
    shutil.rmtree(tmp_path / "spool")
    assert _publish(publisher, 0) is PublishStatus.DISABLED
    assert not publisher.close(0.1)


def test_close_is_false_where_the_spool_cannot_be_looked_into(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    publisher = spool_publisher(tmp_path)
    assert _publish(publisher, 0) is PublishStatus.PUBLISHED
    wait_until(lambda: bool(SpoolFolder(tmp_path).bundles()))
    (tmp_path / "run").rename(tmp_path / "away")
    (tmp_path / "run").touch()
    assert not publisher.close(0.2)
    assert "whether all of rank 0 is in Kafka cannot be told" in caplog.text


def test_close_in_a_forked_child_does_nothing(tmp_path: Path) -> None:
    publisher = spool_publisher(tmp_path)
    assert _publish(publisher, 0) is PublishStatus.PUBLISHED
    child = os.fork()
    if child == 0:
        os._exit(int(publisher.close(30)))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert SpoolFolder(tmp_path).has_trainers()
    assert _publish(publisher, 1) is PublishStatus.PUBLISHED
    _ship(SpoolFolder(tmp_path), 2)
    assert publisher.close(5)
