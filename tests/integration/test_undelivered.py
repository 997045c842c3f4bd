"""What a trainer hears while bundles wait in its spool, and none leaves it."""

from pathlib import Path

import pytest

from fixtures.publishers import spool_session
from rollcast.producer.session import Session
from rollcast.producer.spool.read import TENSORS_NAME
from rollcast.producer.undelivered import DeliveryWatch


class _Watched:
    """A watch over a spool, with a clock that is put on by hand."""

    def __init__(self, session: Session) -> None:
        self._now = 1000.0
        self.session = session
        self._watch = DeliveryWatch(session, None, lambda: self._now)
        session.spool.set_destination("run", session.config.destination)

    def commit(self, rollout_id: int, source: str = "dp0") -> Path:
        """Returns a bundle that waits from now on."""
        bundle = self.session.spool.run_folder("run") / f"{rollout_id}-a{self.session.attempt}-{source}"
        bundle.mkdir()
        (bundle / TENSORS_NAME).touch()
        return bundle

    def go_on(self, seconds: int) -> None:
        """Looks each second, as the background thread does."""
        for _ in range(seconds):
            self._watch.look()
            self._now += 1


@pytest.fixture
def watched(tmp_path: Path) -> _Watched:
    return _Watched(spool_session(tmp_path))


def test_a_spool_that_nothing_leaves_is_told_once_in_ten_minutes(
    watched: _Watched, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for rollout_id in range(25):
        watched.commit(rollout_id)
        watched.go_on(1)
    assert not caplog.records
    watched.go_on(575)
    (told,) = caplog.records
    assert told.levelname == "WARNING"
    assert "nothing has gone to Kafka for " in told.getMessage()
    assert f"waiting in {tmp_path} for Kafka at 127.0.0.1:1: 25 bundles, and no rollcast-ship" in told.getMessage()
    watched.go_on(600)
    assert len(caplog.records) == 2


def test_a_spool_that_drains_slower_than_it_fills_is_not_told(
    watched: _Watched, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = []
    for rollout_id in range(20):
        waiting += [watched.commit(rollout_id), watched.commit(100 + rollout_id)]
        watched.go_on(20)
        watched.session.spool.retire(waiting.pop(0))
    assert not caplog.records


def test_a_rollout_now_and_then_that_is_shipped_at_once_is_not_told(
    watched: _Watched, caplog: pytest.LogCaptureFixture
) -> None:
    for rollout_id in range(5):
        watched.go_on(120)
        bundle = watched.commit(rollout_id)
        watched.go_on(1)
        watched.session.spool.retire(bundle)
    assert not caplog.records


def test_the_writer_of_the_first_bundle_speaks_for_all_of_the_spool(
    watched: _Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.commit(1)
    first = watched.commit(0, "dp1")
    watched.go_on(100)
    assert not caplog.records
    watched.session.spool.retire(first)
    watched.go_on(700)
    assert "1 bundle, and" in caplog.text
