"""Parts with one identity and different content: the digest decides, not who came first."""

from dataclasses import replace

import pytest

from fixtures.assembling import Events, Feed, assembler, completed, events
from rollcast.consumer.assembler import Assembler
from rollcast.consumer.decisions import Duplicate
from rollcast.consumer.restore import restore
from rollcast.consumer.rivals import parts_of, same_content, settle
from rollcast.consumer.rollout import Rollout, SlotCut, WholeSlot
from rollcast.schemas import DEFAULT_LIMITS, Column, SamplePart

FORGED = (Column("forged", 0, "x"),)


def forged(part: SamplePart, text: str = "x") -> SamplePart:
    return replace(part, columns=(Column("forged", 0, text),))


def parts(incoming: Events) -> list[SamplePart]:
    return [event for event in incoming if isinstance(event, SamplePart)]


def only(rollouts: list[Rollout]) -> Rollout:
    (rollout,) = rollouts
    return rollout


def slot_of(rollout: Rollout, part: SamplePart) -> WholeSlot:
    shard = rollout.shards[part.data_parallel_rank]
    return next(slot for slot in shard.slots if slot.cut.slot == part.slot)


def payload_text(rollout: Rollout) -> str:
    restored = restore(rollout, DEFAULT_LIMITS)
    assert restored.bad_slots == ()
    assert restored.payload is not None
    return repr(restored.payload)


def refuse(target: Assembler, rollout: Rollout) -> list[Rollout]:
    """What is handed out after a rollout was refused as the daemon refuses it."""
    settled, _ = settle(rollout, DEFAULT_LIMITS)
    bad = [entry.slot for entry in restore(settled, DEFAULT_LIMITS).bad_slots]
    assert bad
    return completed(target.reject(rollout.id, [each.cut for slot in bad for each in (slot, *slot.rivals)]))


@pytest.mark.parametrize("number", [0, 2, 4])
def test_a_forged_part_that_comes_first_is_told_from_the_right_one(number: int) -> None:
    incoming = events(long=True)
    direct = payload_text(only(completed(Feed(assembler())(incoming))))
    wrong = forged(parts(incoming)[number])
    rollout = only(completed(Feed(assembler())([wrong, *incoming])))

    settled, known_wrong = settle(rollout, DEFAULT_LIMITS)

    assert payload_text(settled) == direct
    assert [part for part, _ in known_wrong] == [wrong]


def test_several_forged_parts_of_one_slot_are_told_from_the_right_ones() -> None:
    incoming = events(long=True)
    direct = payload_text(only(completed(Feed(assembler())(incoming))))
    slot = [part for part in parts(incoming) if (part.data_parallel_rank, part.slot) == (0, 0)]
    assert len(slot) > 1
    wrong = [forged(part, text) for part in slot[:2] for text in "ab"]

    settled, known_wrong = settle(only(completed(Feed(assembler())([*wrong, *incoming]))), DEFAULT_LIMITS)

    assert payload_text(settled) == direct
    assert sorted(map(repr, wrong)) == sorted(repr(part) for part, _ in known_wrong)


def test_a_forged_slot_in_another_number_of_parts_is_told_from_the_right_one() -> None:
    incoming = events(long=True)
    direct = payload_text(only(completed(Feed(assembler())(incoming))))
    wrong = replace(forged(parts(incoming)[0]), part=0, part_count=1)
    assert parts(incoming)[0].part_count > 1

    settled, known_wrong = settle(only(completed(Feed(assembler())([wrong, *incoming]))), DEFAULT_LIMITS)

    assert payload_text(settled) == direct
    assert [part for part, _ in known_wrong] == [wrong]


def test_the_right_part_that_comes_while_the_forged_one_is_examined_completes_the_rollout() -> None:
    incoming = events(long=True)
    right = parts(incoming)[0]
    target = assembler()
    feed = Feed(target)
    examined = only(completed(feed([forged(right), *(event for event in incoming if event is not right)])))
    assert completed(feed([right])) == []

    again = only(refuse(target, examined))

    settled, _ = settle(again, DEFAULT_LIMITS)
    assert payload_text(settled) == payload_text(only(completed(Feed(assembler())(incoming))))


def test_without_the_right_part_all_of_the_slot_is_refused_and_may_come_again() -> None:
    incoming = events()
    right = parts(incoming)[0]
    target = assembler()
    feed = Feed(target)
    others = [event for event in incoming if event is not right]
    examined = only(completed(feed([forged(right, "a"), forged(right, "b"), *others])))
    slot = slot_of(examined, right)
    assert [part for part, _ in parts_of(slot)] == [forged(right, "a"), forged(right, "b")]

    assert refuse(target, examined) == []

    assert len(completed(feed([right]))) == 1


def test_a_repeat_stays_a_repeat() -> None:
    incoming = events(long=True)
    target = assembler()
    feed = Feed(target)
    feed(incoming[:-1])
    before = target.resident_bytes

    decisions = feed(incoming[:-1])

    assert [type(decision) for decision in decisions] == [Duplicate] * (len(incoming) - 1)
    assert target.resident_bytes == before
    rollout = only(completed(feed(incoming[-1:])))
    assert all(slot.rivals == () for shard in rollout.shards for slot in shard.slots)


def test_no_more_than_a_few_rivals_are_held() -> None:
    incoming = events()
    part = parts(incoming)[0]
    target = assembler()
    feed = Feed(target)
    feed([part])
    one = target.resident_bytes

    feed([forged(part, str(number)) for number in range(1000)])
    feed([replace(part, part_count=count) for count in range(2, 1000)])

    assert target.resident_bytes < 10 * one


@pytest.mark.parametrize(
    ("one", "other"), [(1, True), (0.0, -0.0), (1, 1.0), ("a", b"a"), ([1], [2]), (None, False), ({"a": 1}, {"a": 2})]
)
def test_what_differs_on_the_wire_is_not_the_same(one: object, other: object) -> None:
    part = parts(events())[0]
    left, right = (replace(part, columns=(Column("x", 0, value),)) for value in (one, other))  # type: ignore[arg-type]

    assert not same_content(left, right)
    assert same_content(left, left)


def test_a_value_that_is_not_equal_to_itself_is_the_same() -> None:
    part = replace(parts(events())[0], columns=(Column("x", 0, float("nan")),))

    assert same_content(part, replace(part, columns=(Column("x", 0, float("nan")),)))


def test_a_slot_keeps_its_cut_when_another_one_follows() -> None:
    incoming = events()
    part = parts(incoming)[0]
    rollout = only(completed(Feed(assembler())([part, replace(part, part_count=2), *incoming])))

    slot = slot_of(rollout, part)
    assert slot.cut == SlotCut(part.data_parallel_rank, part.slot, 1)
    assert slot.rivals == ()
