"""Counters by run, never more than a bound; and what the end line of a log says of them all."""

from collections import Counter

from rollcast.consumer.stats import MAX_RUNS, OTHER_RUNS, Stats


def test_records_are_counted_by_run_and_reason() -> None:
    stats = Stats()
    for reason in ("duplicate", "duplicate", "late"):
        stats.count("a", reason)

    assert stats.by_run == {("a", "duplicate"): 2, ("a", "late"): 1}


def test_runs_beyond_the_bound_are_counted_together() -> None:
    stats = Stats()
    for number in range(3 * MAX_RUNS):
        stats.count(f"run-{number}", "stale")
    stats.count("run-0", "stale")

    assert stats.by_run["run-0", "stale"] == 2
    assert stats.by_run[OTHER_RUNS, "stale"] == 2 * MAX_RUNS
    assert len(stats.by_run) == MAX_RUNS + 1


def test_the_end_of_a_daemon_is_told_in_a_sentence_with_the_numbers_that_matter() -> None:
    assert Stats().in_words() == "0 records (0 B) read, 0 dumps written, 0 incomplete ones, 0 dead letters"
    stats = Stats(records=9, record_bytes=8_100, dumps=2, incomplete_dumps=1, dead_letters=Counter(invalid=2, decode=1))
    assert stats.in_words() == (
        "9 records (8.1 kB) read, 2 dumps written, 1 incomplete one, 3 dead letters (1 decode, 2 invalid)"
    )
