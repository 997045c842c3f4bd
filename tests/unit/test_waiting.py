"""Rollouts whose dump could not be written: when each is tried again, and what they hold meanwhile."""

import errno
import logging

import pytest

from fixtures.assembling import Feed, assembler, completed, events
from rollcast.consumer.assembler import Assembler
from rollcast.consumer.errors import QuotaError
from rollcast.consumer.rollout import Rollout
from rollcast.consumer.waiting import Waiting, is_lasting

FULL = OSError(errno.ENOSPC, "No space left on device")
FOLDER = IsADirectoryError(errno.EISDIR, "Is a directory")


def two_complete(target: Assembler) -> tuple[Rollout, Rollout]:
    one, two = completed(Feed(target)([*events(1), *events(2)]))
    return one, two


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.ESTALE])
def test_a_disk_that_fails_can_come_back_by_itself(number: int) -> None:
    assert not is_lasting(OSError(number, "?"))


@pytest.mark.parametrize("number", [errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EACCES, errno.EILSEQ])
def test_a_name_that_cannot_be_written_stays_so(number: int) -> None:
    assert is_lasting(OSError(number, "?"))


def test_a_lock_that_another_process_holds_is_free_one_day_and_a_quota_of_a_run_is_raised_by_somebody() -> None:
    assert not is_lasting(TimeoutError("held"))
    assert is_lasting(QuotaError(errno.EDQUOT, "too large"))


def test_one_that_waits_holds_its_offsets_and_is_handed_out_when_it_is_due() -> None:
    target = assembler()
    waiting = Waiting(target)
    one, two = two_complete(target)
    assert waiting.pause_s(0.0) is None

    waiting.put_back(one, FOLDER, now=0.0)
    target.finish(two.id, complete=True)

    assert target.low_watermark(0, 1000) == 0
    assert waiting.pause_s(0.0) == 0.5
    assert waiting.due(0.4) is None
    again = waiting.due(0.5)
    assert again is not None
    assert (again.id, again.shards) == (one.id, one.shards)
    assert not target.awaits(one)
    assert list(waiting.failing) == [f"write the dump of {one.id}"]
    target.finish(again.id, complete=True)
    waiting.written(again.id)
    assert waiting.failing == {}
    assert target.low_watermark(0, 1000) == 1000


@pytest.mark.parametrize(("problem", "longest_s"), [(FULL, 30.0), (FOLDER, 300.0)])
def test_the_pauses_grow_to_a_bound(problem: OSError, longest_s: float) -> None:
    target = assembler()
    waiting = Waiting(target)
    (rollout,) = completed(Feed(target)(events(1)))
    again: Rollout | None = rollout
    now = 0.0
    pauses: list[float] = []
    while again is not None and len(pauses) < 15:
        waiting.put_back(again, problem, now)
        pause_s = waiting.pause_s(now)
        assert pause_s is not None
        pauses.append(pause_s)
        now += pause_s
        again = waiting.due(now)

    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert pauses[-1] == longest_s


def test_after_a_try_that_failed_there_is_a_pause_whatever_is_due() -> None:
    target = assembler()
    waiting = Waiting(target)
    one, two = two_complete(target)
    waiting.put_back(one, FULL, now=0.0)
    waiting.put_back(two, FULL, now=0.0)

    again = waiting.due(10.0)
    assert again is not None
    waiting.put_back(again, FULL, now=10.0)

    assert waiting.due(10.0) is None
    assert waiting.pause_s(10.0) == 0.5
    other = waiting.due(10.5)
    assert other is not None
    assert other.id != again.id


def test_only_a_disk_that_can_come_back_is_worth_waiting_for_when_room_is_short() -> None:
    target = assembler()
    waiting = Waiting(target)
    one, two = two_complete(target)
    waiting.put_back(one, FOLDER, now=0.0)
    target.finish(two.id, complete=True)
    assert not target.awaits_finish
    assert target.awaits_another_try
    assert (waiting.count(lasting=True), waiting.count(lasting=False)) == (1, 0)

    again = waiting.due(10.0)
    assert again is not None
    waiting.put_back(again, FULL, now=10.0)

    assert target.awaits_finish
    assert (waiting.count(lasting=True), waiting.count(lasting=False)) == (0, 1)


def test_one_whose_partition_was_given_away_is_waited_for_no_longer() -> None:
    target = assembler()
    waiting = Waiting(target)
    one, _ = two_complete(target)
    waiting.put_back(one, FOLDER, now=0.0)

    target.forget(0)

    assert waiting.failing == {}
    assert waiting.pause_s(0.0) is None
    assert waiting.due(1000.0) is None


def test_one_that_a_higher_attempt_supersedes_is_given_up() -> None:
    target = assembler()
    waiting = Waiting(target)
    feed = Feed(target)
    (rollout,) = completed(feed(events(1)))
    feed(events(1, attempt=2)[:1])

    waiting.put_back(rollout, FOLDER, now=0.0)

    assert waiting.failing == {}
    assert not target.is_tried(rollout.id)


def test_an_incomplete_one_that_waits_is_completed_by_what_comes_late() -> None:
    target = assembler()
    waiting = Waiting(target)
    feed = Feed(target)
    *most, last = events(1)
    feed(most)
    (incomplete,) = target.expire(10.0)
    waiting.put_back(incomplete.rollout, FULL, now=10.0)

    (rollout,) = completed(feed([last], now=11.0))

    assert not rollout.missing
    assert waiting.due(1000.0) is None


def test_a_repeat_causes_no_try_before_its_time() -> None:
    target = assembler()
    waiting = Waiting(target)
    feed = Feed(target)
    (rollout,) = completed(feed(events(1)))
    waiting.put_back(rollout, FULL, now=0.0)

    assert completed(feed(events(1))) == []


def test_the_log_tells_each_dump_once_and_then_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "rollcast.consumer")
    target = assembler()
    waiting = Waiting(target)
    one, two = two_complete(target)
    waiting.put_back(one, FOLDER, now=0.0)
    waiting.put_back(two, FOLDER, now=0.0)
    assert len(caplog.records) == 2

    for now in range(1, 119):
        if (again := waiting.due(float(now))) is not None:
            waiting.put_back(again, FOLDER, float(now))

    assert len(caplog.records) == 3
