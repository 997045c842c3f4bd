"""Reads the trainer's settings, whatever object they come in."""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rollcast.producer.schedule.errors import ScheduleError


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainParallel:
    """The part of the trainer's parallel layout that shapes a schedule.

    Attributes:
        dp_size: data-parallel ranks, context parallelism left aside.
        cp_size: ranks that share one sample's tokens.
        micro_batch_group: each rank's micro-batches of a step come in multiples of this; 1 without virtual stages.
    """

    dp_size: int
    cp_size: int
    micro_batch_group: int

    @property
    def micro_batch_multiple(self) -> int:
        """The micro-batches of a step, over all ranks, come in multiples of this."""
        return self.dp_size * self.micro_batch_group

    def describe_multiple(self) -> str:
        """Returns the multiple with the settings it comes from, for messages."""
        group = f" x microbatch_group_size_per_vp_stage {self.micro_batch_group}" if self.micro_batch_group > 1 else ""
        return f"{self.micro_batch_multiple} (dp_size {self.dp_size}{group})"


def read_train_parallel(train_parallel_config: Any) -> TrainParallel:
    """Returns the checked layout from a mapping or an object with attributes.

    `cp_size` and `vpp_size` count as 1 where absent or None; `microbatch_group_size_per_vp_stage` is needed only where
    `vpp_size` is above 1.

    Raises:
        ScheduleError: a size is absent or no positive integer.
    """
    where = "train_parallel_config"
    virtual_stages = positive_setting(train_parallel_config, "vpp_size", where=where, default=1)
    return TrainParallel(
        dp_size=positive_setting(train_parallel_config, "dp_size", where=where),
        cp_size=positive_setting(train_parallel_config, "cp_size", where=where, default=1),
        micro_batch_group=1
        if virtual_stages == 1
        else positive_setting(train_parallel_config, "microbatch_group_size_per_vp_stage", where=where),
    )


def setting(source: Any, name: str) -> Any:
    """Returns a value of a mapping or an object with attributes; None where it is absent."""
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)


def positive_setting(source: Any, name: str, *, where: str = "args", default: int | None = None) -> int:
    """Returns a setting that counts something.

    Raises:
        ScheduleError: it is absent without a default, or no positive integer.
    """
    value = setting(source, name)
    if value is None and default is not None:
        return default
    number = _whole_number(value)
    if number is None or number < 1:
        raise ScheduleError(f"{where}.{name} is {value!r}; the schedule needs a positive integer there")
    return number


def whole_numbers(name: str, values: Iterable[Any]) -> list[int]:
    """Returns a column of integers, which may come as NumPy or tensor scalars.

    Raises:
        ScheduleError: an entry is no integer or negative.
    """
    numbers = []
    for place, value in enumerate(values):
        number = _whole_number(value)
        if number is None or number < 0:
            raise ScheduleError(f"{name}[{place}] is {value!r}; it needs an integer of 0 or more for each sample")
        numbers.append(number)
    return numbers


def _whole_number(value: Any) -> int | None:
    try:
        return operator.index(value)
    except TypeError:
        return None
