"""Equal-count partitioning, measured against all partitions where they can be counted."""

from collections.abc import Iterator
from itertools import combinations
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollcast.producer.schedule.balance import balanced_groups

# Time says nothing here: other processes may have the machine.
_properties = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])

_COSTS = st.integers(0, 1000)


@st.composite
def _small_problems(draw: st.DrawFn) -> tuple[list[int], int]:
    group_count, group_size = draw(st.sampled_from([(1, 3), (2, 1), (2, 2), (2, 3), (2, 4), (3, 2), (3, 3), (4, 2)]))
    count = group_count * group_size
    return draw(st.lists(_COSTS, min_size=count, max_size=count)), group_count


def _all_partitions(items: list[int], group_size: int) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    first, *rest = items
    for others in combinations(rest, group_size - 1):
        left = [item for item in rest if item not in others]
        for partition in _all_partitions(left, group_size):
            yield [[first, *others], *partition]


def _heaviest(costs: list[int], groups: list[list[int]]) -> int:
    return max(sum(costs[index] for index in group) for group in groups)


def _spread(costs: list[int], groups: list[list[int]]) -> int:
    sums = [sum(costs[index] for index in group) for group in groups]
    return max(sums) - min(sums)


@_properties
@given(_small_problems())
def test_the_heaviest_group_is_within_its_bound_of_the_best_possible(problem: tuple[list[int], int]) -> None:
    costs, group_count = problem
    group_size = len(costs) // group_count
    heaviest = _heaviest(costs, balanced_groups(costs, group_count))
    best = min(_heaviest(costs, partition) for partition in _all_partitions(list(range(len(costs))), group_size))
    assert heaviest * group_count <= (2 * group_count - 1) * best
    if group_size <= 2:
        assert heaviest == best


@_properties
@given(st.integers(1, 5), st.integers(0, 5), st.data())
def test_groups_are_equally_many_and_differ_by_less_than_their_closest_neighbours(
    group_count: int, group_size: int, data: st.DataObject
) -> None:
    count = group_count * group_size
    costs = data.draw(st.lists(_COSTS, min_size=count, max_size=count))
    groups = balanced_groups(costs, group_count)
    assert [len(group) for group in groups] == [group_size] * group_count
    assert sorted(index for group in groups for index in group) == list(range(count))
    assert all(group == sorted(group) for group in groups)
    ranked = sorted(costs)
    neighbours = [ranked[start : start + group_count] for start in range(0, count, group_count)]
    widest = max((near[-1] - near[0] for near in neighbours), default=0)
    assert _spread(costs, groups) <= widest


def test_the_heaviest_group_comes_first_and_equal_costs_always_fall_alike() -> None:
    assert balanced_groups([1, 9, 5, 8], 2) == [[2, 3], [0, 1]]
    assert balanced_groups([4] * 6, 3) == balanced_groups([4] * 6, 3)


@pytest.mark.parametrize("group_count", [2, 4, 8])
def test_it_balances_long_tailed_costs_far_better_than_dealing_in_turn(group_count: int) -> None:
    random = Random(group_count)  # noqa: S311 - repeatable costs, nothing secret
    balanced = dealt = 0
    for _ in range(20):
        costs = [int(random.lognormvariate(7, 1)) for _ in range(16 * group_count)]
        balanced += _spread(costs, balanced_groups(costs, group_count))
        dealt += _spread(costs, [list(range(rank, len(costs), group_count)) for rank in range(group_count)])
    assert balanced * 2 < dealt
