"""What tells a restarted trainer from two trainers of one run."""

import logging
from dataclasses import replace

import pytest

from fixtures.assembling import closing, events
from rollcast.consumer.decisions import Stale
from rollcast.consumer.rollout import RolloutId
from rollcast.consumer.trainers import Trainers
from rollcast.schemas import DpShard


def published(attempt: int, rollout_id: int, at_ms: int, run_id: str = "run") -> DpShard:
    return replace(closing(events(rollout_id, attempt=attempt, run_id=run_id)), published_at_ms=at_ms)


def stale(attempt: int, rollout_id: int) -> Stale:
    return Stale(RolloutId("run", attempt, rollout_id), attempt + 1)


def alarms(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture(autouse=True)
def _everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rollcast.consumer")


def test_what_a_restarted_trainer_left_is_no_alarm_whenever_it_comes(caplog: pytest.LogCaptureFixture) -> None:
    trainers = Trainers()
    trainers.saw(published(1, 4, 100))
    trainers.saw(published(2, 4, 500))
    for rollout_id, at_ms in ((4, 100), (5, 200), (6, 300)):
        trainers.saw(published(1, rollout_id, at_ms))
        trainers.left(stale(1, rollout_id), now=rollout_id)

    assert alarms(caplog) == []
    assert len(caplog.records) == 1
    assert "a trainer that is restarted leaves such records" in caplog.text


def test_a_lower_attempt_that_publishes_while_a_higher_one_does_is_one_alarm(caplog: pytest.LogCaptureFixture) -> None:
    trainers = Trainers()
    trainers.saw(published(2, 8, 600))
    trainers.saw(published(2, 7, 500))
    for rollout_id in range(9, 12):
        trainers.saw(published(1, rollout_id, 501 + rollout_id))

    assert alarms(caplog) == [
        "run 'run': attempt 1 published rollout 9 after attempt 2 had begun: two trainers share one run id"
    ]


def test_a_lower_attempt_that_does_not_end_is_one_alarm_whatever_its_clock_says(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainers = Trainers()
    trainers.saw(published(2, 4, 500))
    for minute in range(12):
        trainers.saw(published(1, 5 + minute, 100 + minute))
        trainers.left(stale(1, 5 + minute), now=60 * minute)
        assert len(alarms(caplog)) == (minute >= 10)
    assert "attempt 1 still sends 10 minutes later" in alarms(caplog)[0]


def test_other_runs_have_attempts_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    trainers = Trainers()
    trainers.saw(published(2, 0, 100))
    trainers.saw(published(1, 0, 200, run_id="other"))
    assert alarms(caplog) == []


def test_a_third_trainer_is_compared_with_what_the_third_published_first(caplog: pytest.LogCaptureFixture) -> None:
    trainers = Trainers()
    trainers.saw(published(1, 0, 100))
    trainers.saw(published(2, 0, 200))
    trainers.saw(published(3, 0, 300))
    trainers.saw(published(2, 1, 250))
    assert alarms(caplog) == []

    trainers.saw(published(2, 2, 350))
    assert len(alarms(caplog)) == 1


def test_thousands_of_runs_are_not_remembered_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    trainers = Trainers()
    for number in range(2000):
        trainers.saw(published(2, 0, 100, run_id=f"run-{number}"))
    trainers.saw(published(1, 0, 200, run_id="run-0"))
    assert alarms(caplog) == []
    trainers.saw(published(1, 0, 200, run_id="run-1999"))
    assert len(alarms(caplog)) == 1
