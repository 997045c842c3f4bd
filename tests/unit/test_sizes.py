"""Sizes and counts as a person reads them."""

import pytest

from rollcast.schemas.sizes import counted, size_in_words


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.6, "1.0 kB"),
        (1000, "1.0 kB"),
        (9_120, "9.1 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (30_000_000, "30.0 MB"),
        (64 * 1024**3, "68.7 GB"),
        (10**16, "10000.0 TB"),
    ],
)
def test_a_size_is_told_in_the_unit_that_fits(count: float, words: str) -> None:
    assert size_in_words(count) == words


def test_a_count_has_its_noun_in_the_right_number() -> None:
    assert [counted(count, "shard") for count in (0, 1, 2)] == ["0 shards", "1 shard", "2 shards"]
    assert [counted(count, "entry", "entries") for count in (0, 1, 2)] == ["0 entries", "1 entry", "2 entries"]
