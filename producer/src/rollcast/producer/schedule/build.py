"""The whole schedule: steps, micro-batches, and who trains them."""

from collections.abc import Sequence
from typing import Any

from rollcast.producer.schedule.balance import balanced_groups
from rollcast.producer.schedule.errors import ScheduleError
from rollcast.producer.schedule.flops import read_model_shape
from rollcast.producer.schedule.packing import pack_step_into_mbs
from rollcast.producer.schedule.settings import positive_setting, read_train_parallel, setting, whole_numbers
from rollcast.producer.schedule.steps import group_by_rollout, split_into_steps
from rollcast.schemas.sizes import counted


def build_dp_schedule(
    args: Any,
    train_parallel_config: Any,
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    rollout_indices: Sequence[int] | None,
) -> tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]:
    """Returns which rank trains which samples in which micro-batches; a function of its arguments alone.

    Steps are cut first (`global_batch_size` rollouts each, in order of first appearance, trailing rollouts trimmed, or
    `args.custom_step_split`), then packed (`pack_step_into_mbs`), then dealt out: micro-batch i to rank `i % dp_size`,
    or, with `args.balance_data`, equally many to each rank with close sums of estimated forward FLOPs
    (`balanced_groups`, on Megatron's model sizes in `args`).

    Args:
        args: the trainer's settings, by attribute or key.
        train_parallel_config: `dp_size`, `cp_size`, `vpp_size`, `microbatch_group_size_per_vp_stage`, likewise.
        total_lengths: tokens of each sample, prompt included.
        global_batch_size: rollouts in a step.
        rollout_indices: the rollout of each sample; None: each sample is a rollout of its own.

    Returns:
        `partitions`: for each rank, its samples (places in `total_lengths`) in the order in which it trains them.
        `micro_batch_indices`: for each rank, its micro-batches of all steps, as places in its partition; put one after
            the other they count 0, 1, 2, ... to the end of the partition.
        `num_microbatches`: for each step, the micro-batches of every rank.
        `global_batch_sizes`: for each step, its rollouts.

    Raises:
        ScheduleError: a setting or column is wrong, or the samples do not fit the layout.
    """
    parallel = read_train_parallel(train_parallel_config)
    step_size = positive_setting(
        {"global_batch_size": global_batch_size}, "global_batch_size", where="build_dp_schedule"
    )
    lengths = whole_numbers("total_lengths", total_lengths)
    rollouts = range(len(lengths)) if rollout_indices is None else whole_numbers("rollout_indices", rollout_indices)
    if len(rollouts) != len(lengths):
        raise ScheduleError(
            f"rollout_indices has {counted(len(rollouts), 'entry', 'entries')} and total_lengths {len(lengths)}; "
            "both need one per sample"
        )
    partitions: list[list[int]] = [[] for _ in range(parallel.dp_size)]
    micro_batch_indices: list[list[list[int]]] = [[] for _ in range(parallel.dp_size)]
    num_microbatches = []
    global_batch_sizes = []
    for number, step in enumerate(split_into_steps(args, group_by_rollout(rollouts), step_size)):
        samples = [sample for group in step for sample in group]
        try:
            packed = pack_step_into_mbs(args, train_parallel_config, [lengths[sample] for sample in samples])
        except ScheduleError as exc:
            raise ScheduleError(f"step {number} ({counted(len(step), 'rollout')}): {exc}") from exc
        micro_batches = [[samples[place] for place in places] for places in packed]
        for rank, owned in enumerate(_deal_out(args, micro_batches, lengths, parallel.dp_size)):
            for micro_batch in owned:
                start = len(partitions[rank])
                partitions[rank] += micro_batch
                micro_batch_indices[rank].append(list(range(start, len(partitions[rank]))))
        num_microbatches.append(len(micro_batches) // parallel.dp_size)
        global_batch_sizes.append(len(step))
    return partitions, micro_batch_indices, num_microbatches, global_batch_sizes


def _deal_out(args: Any, micro_batches: list[list[int]], lengths: list[int], dp_size: int) -> list[list[list[int]]]:
    """Returns each rank's micro-batches, equally many, in their order."""
    if not setting(args, "balance_data"):
        return [micro_batches[rank::dp_size] for rank in range(dp_size)]
    shape = read_model_shape(args)
    costs = [sum(shape.forward_flops(lengths[sample]) for sample in samples) for samples in micro_batches]
    return [[micro_batches[place] for place in places] for places in balanced_groups(costs, dp_size)]
