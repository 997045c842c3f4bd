"""Cuts the rollouts of a batch into optimizer steps; the samples of one rollout stay together."""

import operator
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, cast

from rollcast.producer.schedule.errors import ScheduleError
from rollcast.producer.schedule.settings import setting
from rollcast.schemas.sizes import counted

RolloutGroup: TypeAlias = list[int]
"""The global indices of one rollout's samples."""

Step: TypeAlias = list[RolloutGroup]
"""The rollouts of one optimizer step."""

StepSplit: TypeAlias = Callable[[list[RolloutGroup], int], Iterable[Iterable[Sequence[int]]]]
"""A custom step split: rollouts and `global_batch_size` to steps; rollouts that it leaves out are trimmed."""


def group_by_rollout(rollout_indices: Iterable[int]) -> list[RolloutGroup]:
    """Returns the samples of each rollout, rollouts in the order in which they first appear."""
    groups: dict[int, RolloutGroup] = {}
    for sample, rollout in enumerate(rollout_indices):
        groups.setdefault(rollout, []).append(sample)
    return list(groups.values())


def split_into_steps(args: Any, groups: list[RolloutGroup], global_batch_size: int) -> list[Step]:
    """Returns steps of `global_batch_size` rollouts, trailing ones trimmed, or what `args.custom_step_split` returns.

    Raises:
        ScheduleError: there are too few rollouts for one step, or the custom split is missing or wrong.
    """
    custom = setting(args, "custom_step_split")
    if custom is not None:
        return _custom_steps(custom, groups, global_batch_size)
    if len(groups) < global_batch_size:
        raise ScheduleError(
            f"{counted(len(groups), 'rollout')} cannot fill one step of global_batch_size {global_batch_size}: lower "
            "it, or let compute_dynamic_global_batch_size choose it"
        )
    starts = range(0, len(groups) - global_batch_size + 1, global_batch_size)
    return [groups[start : start + global_batch_size] for start in starts]


def _custom_steps(custom: object, groups: list[RolloutGroup], global_batch_size: int) -> list[Step]:
    split = _resolve(custom)
    # Copies: what the hook does to its lists must not reach the check below.
    result = split([list(group) for group in groups], global_batch_size)
    try:
        steps = [[tuple(operator.index(sample) for sample in group) for group in step] for step in result]
    except TypeError as exc:
        raise ScheduleError(
            f"args.custom_step_split {custom!r} returned no list of steps, each a list of rollout groups: {exc}"
        ) from exc
    unused = {tuple(group) for group in groups}
    for number, step in enumerate(steps):
        for group in step:
            if group not in unused:
                raise ScheduleError(
                    f"args.custom_step_split {custom!r} put {list(group)} in step {number}, which is no rollout group "
                    "it was given or one already in use: return each group whole and at most once"
                )
            unused.remove(group)
    if not steps or not all(steps):
        raise ScheduleError(
            f"args.custom_step_split {custom!r} returned {'an empty step' if steps else 'no step'} for "
            f"{counted(len(groups), 'rollout')}: return at least one step, each with at least one rollout group"
        )
    return [[list(group) for group in step] for step in steps]


def _resolve(custom: object) -> StepSplit:
    found = custom
    if isinstance(custom, str):
        try:
            found = pkgutil.resolve_name(custom)
        except (ImportError, AttributeError, ValueError) as exc:
            raise ScheduleError(
                f"args.custom_step_split {custom!r} cannot be imported ({exc}): give package.module:function"
            ) from exc
    if not callable(found):
        raise ScheduleError(
            f"args.custom_step_split {custom!r} is a {type(found).__name__}: give a function or its import path, "
            "package.module:function"
        )
    return cast(StepSplit, found)
