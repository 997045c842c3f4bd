"""Which dumps are removed: never what a rule keeps, never more than needed."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollcast.consumer.errors import ConsumeConfigError, QuotaError
from rollcast.consumer.retention import Kept, Retention, what_goes

ROLLOUTS = st.lists(
    st.builds(
        Kept,
        rollout_id=st.integers(0, 40),
        attempt=st.integers(1, 3),
        size=st.integers(0, 100),
    ),
    min_size=1,
    max_size=20,
    unique_by=lambda kept: kept.rollout_id,
)
BOUND = st.none() | st.integers(1, 8)
PINNED = st.frozensets(st.integers(0, 40), max_size=5)


def rule(keep_last: int | None, keep_every: int | None, max_bytes: int | None, pinned: frozenset[int]) -> Retention:
    if keep_last is None and max_bytes is None:
        return Retention()
    return Retention(keep_last=keep_last, keep_every=keep_every, max_bytes=max_bytes, pinned=pinned)


@given(ROLLOUTS, BOUND, BOUND, PINNED)
def test_what_no_exception_keeps_goes_and_nothing_else(
    rollouts: list[Kept], keep_last: int | None, keep_every: int | None, pinned: frozenset[int]
) -> None:
    newest, *others = rollouts
    in_order = sorted(rollouts, key=lambda kept: kept.age, reverse=True)

    goes = what_goes(rule(keep_last, keep_every, None, pinned), others, newest)

    expected = {
        kept
        for kept in in_order[keep_last if keep_last is not None else len(in_order) :]
        if kept != newest
        and kept.rollout_id not in pinned
        and (keep_every is None or kept.rollout_id % keep_every != 0)
    }
    assert set(goes) == expected
    assert len(goes) == len(expected)


@given(ROLLOUTS, BOUND, BOUND, st.integers(1, 800), PINNED, st.randoms(use_true_random=False))
def test_a_quota_is_kept_with_as_few_removals_as_the_order_of_age_allows(
    rollouts: list[Kept],
    keep_last: int | None,
    keep_every: int | None,
    max_bytes: int,
    pinned: frozenset[int],
    order: random.Random,
) -> None:
    newest, *others = rollouts
    retention = rule(keep_last, keep_every, max_bytes, pinned)
    never = newest.size + sum(kept.size for kept in others if kept.rollout_id in pinned)
    if never > max_bytes:
        with pytest.raises(QuotaError):
            what_goes(retention, others, newest)
        return

    goes = what_goes(retention, others, newest)

    stays = [kept for kept in others if kept not in goes]
    assert newest not in goes
    assert not [kept for kept in goes if kept.rollout_id in pinned]
    assert newest.size + sum(kept.size for kept in stays) <= max_bytes
    without_quota = what_goes(rule(keep_last, keep_every, None, pinned), others, newest)
    if beyond := [kept for kept in goes if kept not in without_quota]:
        # The last one that went was needed, and what stays is newer, or is kept longer for its number.
        assert newest.size + sum(kept.size for kept in [*stays, beyond[-1]]) > max_bytes
    assert what_goes(retention, stays, newest) == []
    shuffled = list(others)
    order.shuffle(shuffled)
    assert what_goes(retention, shuffled, newest) == goes


def test_after_a_restart_from_an_earlier_rollout_the_new_attempt_is_the_newest() -> None:
    earlier = [Kept(rollout_id, 1, 10) for rollout_id in (8, 9)]
    resumed = Kept(4, 2, 10)

    assert what_goes(Retention(keep_last=2), [*earlier, resumed], Kept(5, 2, 10)) == earlier


def test_a_rollout_that_does_not_fit_beside_the_pinned_ones_is_refused_and_nothing_goes() -> None:
    retention = Retention(max_bytes=25, pinned=frozenset({1}))

    with pytest.raises(QuotaError, match="rollout 3 takes 20 bytes") as caught:
        what_goes(retention, [Kept(1, 1, 10), Kept(2, 1, 1)], Kept(3, 1, 20))

    assert isinstance(caught.value, OSError)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"keep_last": 0}, r"keep_last \(--keep-last\) is 0"),
        ({"max_bytes": -1}, r"max_bytes \(--max-dump-bytes\) is -1"),
        ({"keep_last": 1, "keep_every": 0}, r"keep_every \(--keep-every\) is 0"),
        ({"keep_every": 2}, "exceptions from keep_last"),
        ({"pinned": frozenset({1})}, "exceptions from keep_last"),
    ],
)
def test_a_rule_that_cannot_work_is_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConsumeConfigError, match=problem):
        Retention(**settings)
