"""The schedule of a rollout: which data-parallel rank trains which samples, in which micro-batches.

Pure Python: nothing here needs torch or a running process group, so every rank computes the same schedule alone.
"""

from rollcast.producer.schedule.batch_size import compute_dynamic_global_batch_size
from rollcast.producer.schedule.build import build_dp_schedule
from rollcast.producer.schedule.errors import ScheduleError
from rollcast.producer.schedule.packing import first_fit_pack, pack_step_into_mbs

__all__ = [
    "ScheduleError",
    "build_dp_schedule",
    "compute_dynamic_global_batch_size",
    "first_fit_pack",
    "pack_step_into_mbs",
]
