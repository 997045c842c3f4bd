"""A custom step split: as a callable, as an import path, and what it must not return."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rollcast.producer.schedule import ScheduleError, build_dp_schedule
from rollcast.producer.schedule.steps import group_by_rollout, split_into_steps

_GROUPS = [[0, 2], [1], [3, 4]]


def _split(custom: object, groups: list[list[int]] = _GROUPS, size: int = 2) -> list[list[list[int]]]:
    return split_into_steps(SimpleNamespace(custom_step_split=custom), groups, size)


def test_rollouts_keep_the_order_of_their_first_sample() -> None:
    assert group_by_rollout([7, 3, 7, 5, 5]) == _GROUPS


def test_without_a_hook_trailing_rollouts_are_trimmed() -> None:
    assert _split(None) == [[[0, 2], [1]]]
    assert split_into_steps(SimpleNamespace(), _GROUPS, 1) == [[[0, 2]], [[1]], [[3, 4]]]


def test_a_hook_decides_order_and_size_of_the_steps_and_may_trim() -> None:
    seen: list[Any] = []

    def last_first(groups: list[list[int]], global_batch_size: int) -> list[list[list[int]]]:
        seen.extend([[list(group) for group in groups], global_batch_size])
        return [[groups[2], groups[0]]]

    schedule = build_dp_schedule(
        SimpleNamespace(custom_step_split=last_first, micro_batch_size=2),
        {"dp_size": 2},
        [1] * 5,
        global_batch_size=9,
        rollout_indices=[7, 3, 7, 5, 5],
    )
    assert seen == [_GROUPS, 9]
    assert schedule == ([[3, 4], [0, 2]], [[[0, 1]], [[0, 1]]], [1], [2])


@pytest.mark.parametrize("separator", [":", "."])
def test_a_hook_may_be_named_by_its_import_path(separator: str) -> None:
    assert _split(f"fixtures.step_splits{separator}one_step") == [_GROUPS]


def test_a_hook_that_empties_its_arguments_harms_nothing() -> None:
    def greedy(groups: list[list[int]], _: int) -> list[list[list[int]]]:
        steps = [[list(group)] for group in groups]
        for group in groups:
            group.clear()
        groups.clear()
        return steps

    groups = [list(group) for group in _GROUPS]
    assert _split(greedy, groups) == [[[0, 2]], [[1]], [[3, 4]]]
    assert groups == _GROUPS


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_such_package.module:function", "cannot be imported .*no_such_package"),
        ("json:no_such_function", "cannot be imported .*no_such_function"),
        ("not a path", "cannot be imported"),
        ("json", "is a module: give a function"),
        (7, "is a int: give a function"),
    ],
)
def test_a_hook_that_cannot_be_found_is_named(path: object, words: str) -> None:
    with pytest.raises(ScheduleError, match=rf"args.custom_step_split {path!r} .*{words}"):
        _split(path)


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (lambda groups, _: None, "returned no list of steps"),
        (lambda groups, _: groups, "returned no list of steps"),
        (lambda groups, _: [[[[0, 2]]]], "returned no list of steps"),
        (lambda groups, _: [], "returned no step for 3 rollouts"),
        (lambda groups, _: [groups, []], "returned an empty step"),
        (lambda groups, _: [[groups[0]], [groups[0]]], r"put \[0, 2\] in step 1, .* already in use"),
        (lambda groups, _: [[[0]], [[2]]], r"put \[0\] in step 0, which is no rollout group"),
    ],
)
def test_a_hook_with_a_wrong_result_is_told_what_to_return(split: Callable[[Any, int], Any], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        _split(split)
