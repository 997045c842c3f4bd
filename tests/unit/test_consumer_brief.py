"""Text for log lines: of bounded length whatever a record claims."""

from rollcast.consumer.brief import brief, first_few
from rollcast.consumer.rollout import Missing, RolloutId


def test_a_short_text_stays_and_a_long_one_is_cut_at_200_characters() -> None:
    assert brief("x" * 200) == "x" * 200
    assert brief("x" * 201) == "x" * 197 + "..."


def test_the_first_five_of_many_are_shown() -> None:
    assert first_few([1, 2]) == "1, 2"
    assert first_few(range(5)) == "0, 1, 2, 3, 4"
    assert first_few(range(10**12)) == "0, 1, 2, 3, 4, ..."


def test_what_is_missing_is_told_by_counts_and_the_first_few() -> None:
    missing = Missing(shards=tuple(range(60_000)), slots=((0, tuple(range(-1, 20_000))), (7, (3,))))

    assert str(missing) == (
        "no closing event of 60000 shards (0, 1, 2, 3, 4, ...); "
        "20002 slots not whole (shard/slot 0/-1, 0/0, 0/1, 0/2, 0/3, ...)"
    )
    assert str(Missing(shard_count_known=False)) == "the number of shards is unknown"
    assert str(Missing()) == "nothing is missing"


def test_a_rollout_is_named_within_bounds() -> None:
    assert len(str(RolloutId("r" * 1024, 1, 0, "policy-loss/7"))) < 300
