"""The marks of dropped rollouts: every drop is announced, and however many there are, disk and memory are bounded."""

from pathlib import Path

import pytest

from fixtures.publishers import spool_publisher
from fixtures.rollouts import whole_shard
from fixtures.waiting import wait_until
from rollcast.producer import PublisherConfig, PublishStatus
from rollcast.producer.control import Control
from rollcast.producer.marks import DropMarks
from rollcast.producer.parallel import ParallelLayout
from rollcast.producer.session import Session, open_session
from rollcast.producer.spool.folder import BundleName, SpoolFolder
from rollcast.producer.spool.read import read_bundle


def _session(spool: Path) -> Session:
    layout = ParallelLayout()
    config = PublisherConfig(run_id="run", spool_dir=spool, bootstrap_servers="127.0.0.1:1", attempt=1)
    return open_session(config, layout, Control(layout, 1.0))


def _drop(marks: DropMarks, session: Session, *rollout_ids: int) -> None:
    for rollout_id in rollout_ids:
        shard = session.closing_event(rollout_id, None, dropped_reason="spool full")
        marks.put(BundleName(rollout_id, 1, "dp0"), shard)


def _announced(spool: SpoolFolder) -> dict[int, str | None]:
    return {name.rollout_id: read_bundle(path).shard.dropped_reason for name, path in spool.bundles()}


def _ship(session: Session) -> None:
    for _, path in session.spool.bundles():
        session.spool.retire(path)

    def is_seen() -> bool:
        session.quota.measure()
        return session.quota.held.marks == 0

    wait_until(is_seen)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two marks fill the spool, and two wait in memory."""
    monkeypatch.setattr("rollcast.producer.quota.MAX_MARKS", 2)
    monkeypatch.setattr("rollcast.producer.marks._MAX_WAITING", 2)


@pytest.mark.usefixtures("few")
def test_marks_are_bounded_and_the_drops_beyond_are_announced_with_the_next_one(tmp_path: Path) -> None:
    session = _session(tmp_path)
    marks = DropMarks(session)
    for rollout_id in range(8):
        _drop(marks, session, rollout_id)
        marks.commit()
    assert _announced(session.spool) == {0: "spool full", 1: "spool full"}
    assert marks.waiting == 6
    _ship(session)
    marks.commit()
    assert _announced(session.spool) == {
        6: "spool full; 4 more dropped, 2-a1-dp0 to 5-a1-dp0, too many for an event each",
        7: "spool full",
    }
    assert marks.waiting == 0


@pytest.mark.usefixtures("few")
def test_the_marks_that_a_dead_trainer_left_count(tmp_path: Path) -> None:
    first = _session(tmp_path)
    marks = DropMarks(first)
    _drop(marks, first, 0, 1)
    marks.commit()
    second = _session(tmp_path)
    marks = DropMarks(second)
    _drop(marks, second, 2)
    marks.commit()
    assert marks.waiting == 1
    _ship(second)
    marks.commit()
    assert list(_announced(second.spool)) == [2]


def test_marks_that_have_waited_are_not_all_committed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollcast.producer.marks._AT_ONCE", 3)
    session = _session(tmp_path)
    marks = DropMarks(session)
    _drop(marks, session, *range(5))
    marks.commit()
    assert list(_announced(session.spool)) == [0, 1, 2]
    marks.commit()
    assert marks.waiting == 0


def test_a_mark_never_contradicts_a_bundle(tmp_path: Path) -> None:
    publisher = spool_publisher(tmp_path, attempt=1)
    assert publisher.publish(0, whole_shard(0, 0, 1)).status is PublishStatus.PUBLISHED
    publisher.close(0.3)
    session = _session(tmp_path)
    marks = DropMarks(session)
    _drop(marks, session, 0)
    marks.commit()
    assert marks.waiting == 0
    assert _announced(session.spool) == {0: None}
    assert not list(tmp_path.rglob("*.marking"))


def test_drops_that_find_no_room_for_their_marks_are_told_when_the_publisher_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rollcast.producer.quota.MAX_MARKS", 1)
    publisher = spool_publisher(tmp_path, max_spool_bundles=1)
    statuses = [str(publisher.publish(number, whole_shard(number, 0, 1)).status) for number in range(4)]
    assert statuses == ["published", *["dropped"] * 3]
    assert not publisher.close(0.5)
    assert f"not announced, because {tmp_path} took no mark of them: 2 drops" in caplog.text


def test_a_repeated_rollout_is_refused_in_words_that_do_not_repeat_themselves(tmp_path: Path) -> None:
    publisher = spool_publisher(tmp_path)
    publisher.publish(0, whole_shard(0, 0, 1))
    again = publisher.publish(0, whole_shard(0, 0, 1))
    publisher.close(0.2)
    assert again.reason == (
        "rank 0 (shard 0): the rollout id is taken: rollout 0 was published or dropped before in this attempt; "
        "use the next id"
    )


def test_a_reason_that_no_event_could_carry_is_made_to_fit(tmp_path: Path) -> None:
    publisher = spool_publisher(tmp_path)
    result = publisher.publish(0, {"response_lengths": [1], "\ud800" * 10_000: [1]})
    assert result.status is PublishStatus.DROPPED
    assert publisher.publish(1, whole_shard(1, 0, 1)).status is PublishStatus.PUBLISHED
    publisher.close(0.5)
    (mark, whole) = [read_bundle(path).shard.dropped_reason for _, path in SpoolFolder(tmp_path).bundles()]
    assert whole is None
    assert mark is not None
    assert mark.startswith("rank 0 (shard 0): rollout_data cannot be published: ")
    assert len(mark) <= 4000
