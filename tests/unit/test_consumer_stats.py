"""Counters by run: as many as there are runs, but never more than a bound."""

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
