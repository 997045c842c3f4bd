"""The assembler: any order, repeats, attempts, drops, contradictions, and what may be committed."""

import random
from dataclasses import replace

import pytest

from fixtures.assembling import Feed, assembler, closing, completed, events
from rollcast.consumer.decisions import (
    Conflict,
    Discarded,
    Dropped,
    Duplicate,
    Stale,
    Superseded,
)
from rollcast.consumer.errors import InvalidRecordError
from rollcast.consumer.rollout import OffsetSpan, Place, Rollout, RolloutId, RolloutKey, WholeSlot
from rollcast.schemas import DpShard, SamplePart


@pytest.mark.parametrize("seed", range(20))
def test_any_order_with_repeats_gives_one_complete_rollout(seed: int) -> None:
    incoming = events(long=True) * 3
    random.Random(seed).shuffle(incoming)  # noqa: S311 - not for secrets

    decisions = Feed(assembler())(incoming)

    (rollout,) = completed(decisions)
    assert not rollout.missing
    assert rollout.sample_count == 3
    assert all([part.part for part in slot.parts] == [*range(slot.cut.part_count)] for slot in slots_of(rollout))
    assert sum(isinstance(decision, Duplicate) for decision in decisions) == 2 * len(incoming) // 3


def slots_of(rollout: Rollout) -> list[WholeSlot]:
    return [slot for shard in rollout.shards for slot in shard.slots]


def test_the_closing_event_may_come_before_the_data() -> None:
    incoming = sorted(events(), key=lambda event: isinstance(event, SamplePart))
    feed = Feed(assembler())

    assert completed(feed(incoming[:-1])) == []
    assert len(completed(feed(incoming[-1:]))) == 1


def test_interleaved_rollouts_do_not_mix() -> None:
    one, two = events(1), events(2)
    mixed = [event for pair in zip(one, two, strict=True) for event in pair]

    rollouts = completed(Feed(assembler())(mixed))

    assert [rollout.id.rollout_id for rollout in rollouts] == [1, 2]
    assert all(part.rollout_id == 1 for shard in rollouts[0].shards for slot in shard.slots for part in slot.parts)


def test_a_rollout_without_samples_is_complete_with_its_shards_own_slot() -> None:
    (rollout,) = completed(Feed(assembler())(events(samples=(0,))))

    assert rollout.sample_count == 0


def test_49_records_delivered_3_times_are_49_and_98_repeats() -> None:
    incoming = events(samples=(47,))
    assert len(incoming) == 49
    target = assembler()
    feed = Feed(target)

    first = feed(incoming)
    target.finish(RolloutId("run", 1, 0), complete=True)
    repeats = feed(incoming * 2)

    assert len(completed(first)) == 1
    assert len(repeats) == 98
    assert all(isinstance(decision, Duplicate) for decision in repeats)


def test_two_cuts_of_one_slot_are_not_mixed() -> None:
    fine = [event for event in events(samples=(1,), long=True) if isinstance(event, SamplePart) and event.slot == 0]
    assert len(fine) == 3
    coarse = replace(fine[0], part=0, part_count=1, columns=sum((part.columns for part in fine), ()))
    others = [event for event in events(samples=(1,), long=True) if event not in fine]

    (rollout,) = completed(Feed(assembler())([*others, fine[1], coarse]))

    (sample,) = [slot for slot in rollout.shards[0].slots if slot.cut.slot == 0]
    assert sample.parts == (coarse,)


def test_a_higher_attempt_supersedes_and_lower_ones_are_stale_from_then_on() -> None:
    old, new = events(attempt=1), events(attempt=2)
    feed = Feed(assembler())
    feed(old[:-1])

    decisions = feed([new[0], old[-1], *new[1:], old[0]])

    assert decisions[0] == Superseded(RolloutId("run", 1, 0), 2)
    assert [decision for decision in decisions if isinstance(decision, Stale)] == 2 * [Stale(RolloutId("run", 1, 0), 2)]
    assert [rollout.id.attempt for rollout in completed(decisions)] == [2]


def test_a_higher_attempt_comes_after_a_finished_one() -> None:
    target = assembler()
    target.remember(RolloutKey("run", 0), 1)

    decisions = Feed(target)(events(attempt=2))

    assert [rollout.id.attempt for rollout in completed(decisions)] == [2]


def test_an_attempt_that_is_being_written_is_not_disturbed_by_a_higher_one() -> None:
    target = assembler()
    feed = Feed(target)
    feed(events(attempt=1))

    decisions = feed(events(attempt=2))
    target.finish(RolloutId("run", 1, 0), complete=True)

    assert [rollout.id.attempt for rollout in completed(decisions)] == [2]
    assert target.open_count == 1
    target.finish(RolloutId("run", 2, 0), complete=True)
    assert target.open_count == 0
    assert target.resident_bytes == 0


def test_a_dropped_rollout_is_given_up_and_told() -> None:
    incoming = events()
    target = assembler()
    feed = Feed(target)
    feed(incoming[:1])
    dropped = replace(closing(incoming), dropped_reason="spool full", slot_digests=(), part_counts=())

    assert feed([dropped]) == [Dropped(RolloutId("run", 1, 0), "spool full")]
    assert feed([dropped]) == [Duplicate(RolloutId("run", 1, 0))]
    assert target.low_watermark(0, feed.offset) == feed.offset


def test_a_second_closing_event_with_other_content_is_a_conflict_and_the_first_is_kept() -> None:
    incoming = events()
    other = replace(closing(incoming), slot_digests=tuple(reversed(closing(incoming).slot_digests)))
    feed = Feed(assembler())

    decisions = feed([closing(incoming), other, *incoming])

    assert isinstance(decisions[0], Conflict)
    assert len(completed(decisions)) == 1


def test_the_same_closing_event_sent_at_another_time_is_a_repeat() -> None:
    event = closing(events())

    assert Feed(assembler())([event, replace(event, published_at_ms=5, part_counts=())]) == [
        Duplicate(RolloutId("run", 1, 0))
    ]


def test_shards_that_disagree_on_their_number_conflict() -> None:
    first, second = (event for event in events() if isinstance(event, DpShard))

    (decision,) = Feed(assembler())([first, replace(second, data_parallel_size=3)])

    assert isinstance(decision, Conflict)


def test_parts_beyond_what_the_closing_event_announces_are_discarded() -> None:
    incoming = events(samples=(2,))
    part = next(event for event in incoming if isinstance(event, SamplePart))
    beyond = [replace(part, slot=5), replace(part, data_parallel_rank=3)]
    feed = Feed(assembler())

    decisions = feed([*beyond, *incoming])

    (discarded,) = [decision for decision in decisions if isinstance(decision, Discarded)]
    assert set(discarded.places) == {Place(0, 0), Place(0, 1)}
    assert len(completed(decisions)) == 1


def test_a_part_beyond_a_known_closing_event_is_refused() -> None:
    incoming = events(samples=(2,))
    part = next(event for event in incoming if isinstance(event, SamplePart))
    feed = Feed(assembler())
    feed([closing(incoming)])

    with pytest.raises(InvalidRecordError, match="slot is 5 of 2 samples"):
        feed([replace(part, slot=5)])
    with pytest.raises(InvalidRecordError, match=r"data_parallel_rank is 3 of 1 shard$"):
        feed([replace(part, data_parallel_rank=3)])


def test_a_rollout_without_progress_is_incomplete_and_names_the_slot_that_is_missing() -> None:
    incoming = [event for event in events(samples=(3,)) if not (isinstance(event, SamplePart) and event.slot == 1)]
    target = assembler(incomplete_after_s=10)
    feed = Feed(target)
    feed(incoming, now=100.0)

    feed(incoming, now=109.0)  # repeats are no progress
    assert target.expire(109.9) == []
    (incomplete,) = target.expire(110.0)

    assert incomplete.rollout.missing.slots == ((0, (1,)),)
    assert incomplete.rollout.missing.shards == ()
    assert target.expire(200.0) == []


def test_an_incomplete_rollout_names_the_shards_that_are_missing() -> None:
    first = [event for event in events(samples=(1, 1, 1)) if event.data_parallel_rank == 1]
    target = assembler()
    Feed(target)(first)

    (incomplete,) = target.expire(10.0)

    assert incomplete.rollout.missing.shards == (0, 2)
    assert incomplete.rollout.missing.shard_count_known


def test_without_any_closing_event_the_number_of_shards_is_unknown() -> None:
    target = assembler()
    Feed(target)([event for event in events() if isinstance(event, SamplePart)])

    (incomplete,) = target.expire(10.0)

    assert not incomplete.rollout.missing.shard_count_known
    assert incomplete.rollout.missing.shards == (0, 1)


def test_a_slot_whose_content_is_refused_counts_as_not_received() -> None:
    incoming = events()
    target = assembler()
    feed = Feed(target)
    (rollout,) = completed(feed(incoming))
    bad = rollout.shards[0].slots[1]

    assert target.reject(rollout.id, [bad.cut]) == []
    assert len(completed(feed(incoming))) == 1


def test_a_slot_that_stays_bad_is_named_at_the_end() -> None:
    target = assembler()
    (rollout,) = completed(Feed(target)(events()))
    target.reject(rollout.id, [rollout.shards[1].slots[0].cut])

    (incomplete,) = target.expire(10.0)

    assert incomplete.rollout.missing.slots == ((1, (-1,)),)


def test_the_low_watermark_is_the_first_record_that_is_still_needed() -> None:
    target = assembler()
    feed = Feed(target, offset=1)
    feed(events(0, samples=(1,)))  # offsets 1, 2, 3
    target.finish(RolloutId("run", 1, 0), complete=True)
    feed(events(1, samples=(1,))[:1])  # offset 4 stays open
    feed(events(2, samples=(1,)))  # offsets 5, 6, 7
    target.finish(RolloutId("run", 1, 2), complete=True)

    assert target.low_watermark(0, 8) == 4
    assert target.low_watermark(1, 3) == 3


def test_a_rollout_that_is_handed_out_holds_the_low_watermark_until_it_is_finished() -> None:
    target = assembler()
    feed = Feed(target)
    feed(events())

    assert target.low_watermark(0, feed.offset) == 0
    target.finish(RolloutId("run", 1, 0), complete=True)
    assert target.low_watermark(0, feed.offset) == feed.offset


def test_a_rollout_in_two_partitions_holds_both_and_completes() -> None:
    incoming = events()
    target = assembler()
    Feed(target, partition=0, offset=100)(incoming[:2])

    (rollout,) = completed(Feed(target, partition=3, offset=7)(incoming[2:]))

    assert rollout.spans == (OffsetSpan(0, 100, 101), OffsetSpan(3, 7, 7 + len(incoming) - 3))
    assert (target.low_watermark(0, 500), target.low_watermark(3, 500)) == (100, 7)


def test_a_revoked_partition_leaves_nothing_behind() -> None:
    target = assembler()
    Feed(target, partition=0)(events(0)[:2])
    left = target.resident_bytes
    Feed(target, partition=1)(events(1))

    target.forget(1)

    assert target.open_count == 1
    assert target.resident_bytes == left
    assert target.low_watermark(1, 9) == 9
    assert not target.knows(RolloutId("run", 1, 1).key)


def test_a_finished_rollout_that_was_read_again_meanwhile_is_closed() -> None:
    incoming = events()
    target = assembler()
    feed = Feed(target)
    feed(incoming)
    target.forget(0)
    feed(incoming[:2])

    target.finish(RolloutId("run", 1, 0), complete=True)

    assert target.open_count == 0
    assert all(isinstance(decision, Duplicate) for decision in feed(incoming))


def test_what_is_held_of_a_log_that_was_replaced_holds_no_watermark_and_still_completes() -> None:
    target = assembler()
    *most, last = events()
    Feed(target, offset=5000)(most)
    target.unpin(0)
    assert target.low_watermark(0, 10) == 10

    feed = Feed(target, offset=10)
    (rollout,) = completed(feed([last]))

    assert not rollout.missing
    assert target.low_watermark(0, feed.offset) == 10
    target.finish(rollout.id, complete=True)
    assert target.low_watermark(0, feed.offset) == 11


def test_the_oldest_open_rollout_tells_since_when_it_is_open() -> None:
    target = assembler()
    assert target.oldest_opened_at is None
    *first, last = events(1)
    feed = Feed(target)
    feed(first[:1], now=3.0)
    feed(events(2)[:1], now=5.0)
    feed(first[1:], now=7.0)
    assert target.oldest_opened_at == 3.0
    (rollout,) = completed(feed([last], now=8.0))
    target.finish(rollout.id, complete=True)
    assert target.oldest_opened_at == 5.0


def test_what_is_overdue_is_handed_out_one_by_one_unless_something_came_since() -> None:
    target = assembler(incomplete_after_s=10.0)
    feed = Feed(target)
    for rollout_id in range(5):
        feed(events(rollout_id)[:1], now=float(rollout_id))

    overdue = target.overdue(13.5)
    assert [identity.rollout_id for identity in overdue] == [0, 1, 2, 3]
    assert target.overdue(13.5) == overdue

    feed(events(1)[1:2], now=14.0)
    (rollout,) = completed(feed(events(2)[1:], now=14.0))
    target.finish(rollout.id, complete=True)
    handed_out = [target.expire_one(identity, 14.0) for identity in overdue]

    assert [each and each.rollout.id.rollout_id for each in handed_out] == [0, None, None, 3]
    assert target.expire_one(overdue[0], 14.0) is None
    assert [identity.rollout_id for identity in target.overdue(14.0)] == [4]
