"""Gaps: told to everybody, and remembered for the rollouts beside them."""

from rollcast.consumer.gaps import Gaps
from rollcast.consumer.rollout import OffsetSpan
from rollcast.consumer.stats import Stats


def test_a_gap_is_counted_and_told_as_a_dead_letter_of_its_first_offset() -> None:
    stats = Stats()
    letter = Gaps("records", stats).note(OffsetSpan(3, 50, 99), "the log begins at 100")
    assert (letter.topic, letter.partition, letter.offset, letter.value, letter.key) == ("records", 3, 50, b"", None)
    assert letter.reason == "gap: offsets 50 to 99 are gone and were not read: the log begins at 100"
    assert (stats.gaps, stats.gap_offsets) == (1, 50)
    assert stats.dead_letters == {}


def test_a_rollout_gets_the_gaps_of_its_partitions_alone() -> None:
    gaps = Gaps("records", Stats())
    here, there = OffsetSpan(1, 0, 9), OffsetSpan(2, 5, 5)
    for gap in (here, there):
        gaps.note(gap, "why")
    assert gaps.beside([OffsetSpan(1, 10, 20)]) == (here,)
    assert gaps.beside([OffsetSpan(1, 10, 20), OffsetSpan(2, 0, 3)]) == (here, there)
    assert gaps.beside([OffsetSpan(0, 0, 3)]) == ()


def test_only_the_latest_gaps_of_a_partition_are_remembered() -> None:
    gaps = Gaps("records", Stats())
    for number in range(1000):
        gaps.note(OffsetSpan(1, 10 * number, 10 * number), "why")
    kept = gaps.beside([OffsetSpan(1, 0, 0)])
    assert len(kept) == 16
    assert kept[-1].first == 9990
