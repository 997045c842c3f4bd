"""The assembler: what comes late still completes a rollout, and memory stays within its cap."""

from dataclasses import replace

import pytest

from fixtures.assembling import Feed, assembler, closing, completed, events
from rollcast.consumer.decisions import Duplicate, Evicted, Late, Superseded
from rollcast.consumer.errors import AssemblerFullError
from rollcast.consumer.rollout import RolloutId
from rollcast.schemas import SamplePart

ID = RolloutId("run", 1, 0)


def test_what_comes_while_an_incomplete_dump_is_written_can_still_complete_it() -> None:
    incoming = events()
    target = assembler()
    feed = Feed(target)
    feed(incoming[:-1])
    target.expire(10.0)

    decisions = feed(incoming[-1:], now=11.0)
    target.finish(RolloutId("run", 1, 0), complete=False)

    assert len(completed(decisions)) == 1
    assert target.knows(RolloutId("run", 1, 0).key)


def test_a_rollout_that_was_written_incomplete_becomes_complete_when_all_comes_again() -> None:
    incoming = events()
    target = assembler()
    feed = Feed(target)
    feed(incoming[:-1])
    target.expire(10.0)
    target.finish(RolloutId("run", 1, 0), complete=False)
    assert target.open_count == 0

    assert len(completed(feed(incoming, now=20.0))) == 1


def test_a_record_that_comes_after_the_incomplete_dump_completes_the_rollout() -> None:
    incoming = events()
    target = assembler()
    feed = Feed(target)
    feed(incoming[:-1])
    target.expire(10.0)
    target.finish(ID, complete=False)

    (rollout,) = completed(feed(incoming[-1:], now=50.0))

    assert not rollout.missing
    assert rollout.sample_count == 3


def test_what_comes_while_the_incomplete_dump_is_written_is_not_forgotten() -> None:
    incoming = events()
    target = assembler()
    feed = Feed(target)
    feed(incoming[:-2])
    target.expire(10.0)
    feed(incoming[-2:-1], now=11.0)
    assert target.expire(30.0) == []  # one snapshot at a time
    target.finish(ID, complete=False)

    assert target.low_watermark(0, feed.offset) == 0
    (again,) = target.expire(30.0)
    target.finish(ID, complete=False)
    assert again.rollout.part_count + 1 == len(incoming) - 1
    assert target.low_watermark(0, feed.offset) == feed.offset
    assert len(completed(feed(incoming[-1:], now=31.0))) == 1


def test_an_old_snapshot_says_nothing_of_what_was_read_again_after_a_rebalance() -> None:
    incoming = events()
    target = assembler()
    feed = Feed(target)
    feed(incoming[:-1])
    (old,) = target.expire(10.0)
    target.forget(0)
    Feed(target)(incoming[:-1], now=20.0)
    assert not target.awaits(old.rollout)

    (new,) = target.expire(30.0)

    assert not target.awaits(old.rollout)
    assert target.awaits(new.rollout)
    assert target.low_watermark(0, len(incoming) - 1) == 0


def test_a_durable_incomplete_rollout_holds_the_low_watermark_only_for_what_came_later() -> None:
    incoming = events()
    target = assembler()
    feed = Feed(target)
    feed(incoming[:-2])
    target.expire(10.0)
    target.finish(ID, complete=False)
    assert target.low_watermark(0, feed.offset) == feed.offset

    feed(incoming[:1], now=11.0)  # a repeat changes nothing
    assert target.low_watermark(0, feed.offset) == feed.offset
    late = feed.offset
    feed(incoming[-2:-1], now=11.0)

    assert target.low_watermark(0, feed.offset) == late


def test_a_durable_incomplete_rollout_is_superseded_like_any_other() -> None:
    target = assembler()
    feed = Feed(target)
    feed(events()[:-1])
    target.expire(10.0)
    target.finish(ID, complete=False)

    decisions = feed(events(attempt=2))

    assert decisions[0] == Superseded(ID, 2)
    assert [rollout.id.attempt for rollout in completed(decisions)] == [2]


def test_a_superseded_rollout_whose_incomplete_dump_becomes_durable_is_closed() -> None:
    target = assembler()
    feed = Feed(target)
    feed(events()[:-1])
    (incomplete,) = target.expire(10.0)
    feed(events(attempt=2)[:1])
    alone = assembler()
    Feed(alone)(events(attempt=2)[:1])

    target.finish(ID, complete=False)

    assert not target.awaits(incomplete.rollout)
    assert target.resident_bytes == alone.resident_bytes


def test_a_rollout_that_is_being_written_may_finish_after_a_higher_attempt_was_dropped() -> None:
    target = assembler()
    feed = Feed(target)
    feed(events()[:-1])
    (incomplete,) = target.expire(10.0)
    feed([replace(closing(events(attempt=2)), dropped_reason="spool full")])

    target.finish(ID, complete=False)

    assert (target.open_count, target.resident_bytes) == (0, 0)
    assert not target.awaits(incomplete.rollout)


def test_a_slot_that_was_refused_in_an_incomplete_dump_may_come_again() -> None:
    incoming = events()
    target = assembler()
    feed = Feed(target)
    feed(incoming[:-1])
    (incomplete,) = target.expire(10.0)
    bad = incomplete.rollout.shards[0].slots[1]
    target.finish(ID, complete=False, refused=[bad.cut])

    assert completed(feed(incoming[-1:], now=11.0)) == []
    assert len(completed(feed(bad.parts, now=12.0))) == 1


def test_without_room_an_error_changes_nothing() -> None:
    incoming = events()
    enough = assembler()
    Feed(enough)(incoming[:3])
    target = assembler(max_resident_bytes=enough.resident_bytes)
    feed = Feed(target)
    feed(incoming[:3])

    with pytest.raises(AssemblerFullError, match=f"max_resident_bytes={enough.resident_bytes}"):
        feed(incoming[3:4])
    assert target.resident_bytes == enough.resident_bytes
    assert target.open_count == 1


def test_a_repeat_needs_no_room() -> None:
    incoming = [event for event in events() if isinstance(event, SamplePart)][:2]
    unbounded = assembler()
    Feed(unbounded)(incoming)
    feed = Feed(assembler(max_resident_bytes=unbounded.resident_bytes))
    feed(incoming)

    assert feed(incoming) == [Duplicate(ID)] * 2


def test_durable_incomplete_rollouts_make_room_the_oldest_first_and_no_more_than_needed() -> None:
    one = assembler()
    Feed(one)(events(0)[:2])
    target = assembler(max_resident_bytes=3 * one.resident_bytes)
    feed = Feed(target)
    for rollout_id, now in ((1, 2.0), (2, 1.0), (3, 3.0)):
        feed(events(rollout_id)[:2], now=now)
    target.expire(100.0)
    for rollout_id in (1, 2, 3):
        target.finish(RolloutId("run", 1, rollout_id), complete=False)

    assert feed(events(4)[:2], now=101.0) == [Evicted(RolloutId("run", 1, 2))]
    assert target.resident_bytes == 3 * one.resident_bytes
    assert target.low_watermark(0, feed.offset) == feed.offset - 2


def test_a_rollout_that_needs_room_for_its_own_late_record_is_evicted_last() -> None:
    one = assembler()
    Feed(one)(events(0)[:2])
    target = assembler(max_resident_bytes=2 * one.resident_bytes)
    feed = Feed(target)
    feed(events(1)[:2], now=1.0)
    feed(events(2)[:2], now=2.0)
    target.expire(100.0)
    for rollout_id in (1, 2):
        target.finish(RolloutId("run", 1, rollout_id), complete=False)

    assert feed(events(1)[2:3], now=101.0) == [Evicted(RolloutId("run", 1, 2)), Late(RolloutId("run", 1, 1))]


def test_the_rollout_that_has_waited_longest_is_given_up_for_room() -> None:
    target = assembler()
    feed = Feed(target)
    feed(events(1)[:2], now=1.0)
    feed(events(2)[:2], now=0.5)
    feed(events(3), now=0.1)
    assert target.awaits_finish  # the third is complete

    given_up = [target.give_up_oldest() for _ in range(3)]

    assert [None if each is None else each.rollout.id.rollout_id for each in given_up] == [2, 1, None]
    assert target.low_watermark(0, feed.offset) == 0


def test_tiny_parts_and_many_columns_count_with_the_memory_they_take() -> None:
    part = next(event for event in events() if isinstance(event, SamplePart))
    columns = tuple(replace(part.columns[0], name=f"c{index}") for index in range(1000))
    plain, wide = assembler(), assembler()

    Feed(plain)([part])
    Feed(wide)([replace(part, columns=columns)])

    assert plain.resident_bytes > 1024
    assert wide.resident_bytes > 400 * 1000


def test_a_repeat_of_a_durable_incomplete_rollout_is_a_repeat() -> None:
    incoming = events()
    target = assembler()
    feed = Feed(target)
    feed(incoming[:-1])
    target.expire(10.0)
    target.finish(ID, complete=False)

    assert feed(incoming[:1], now=11.0) == [Duplicate(ID)]
    assert target.expire(1000.0) == []
