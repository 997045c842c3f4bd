"""The size of a step that uses as many samples as possible."""

from typing import Any

from rollcast.producer.schedule.settings import read_train_parallel


def compute_dynamic_global_batch_size(
    args: Any,  # noqa: ARG001 - trainers pass their settings to every hook of the schedule
    train_parallel_config: Any,
    num_samples: int,
) -> int:
    """Returns `num_samples` rounded down to a multiple of `dp_size`, at least `dp_size`.

    Raises:
        ScheduleError: `dp_size` is absent or no positive integer.
    """
    dp_size = read_train_parallel(train_parallel_config).dp_size
    return max(num_samples // dp_size, 1) * dp_size
