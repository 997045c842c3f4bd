"""Packs the samples of one step into micro-batches."""

import heapq
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from rollcast.producer.schedule.errors import ScheduleError
from rollcast.producer.schedule.flops import read_model_shape
from rollcast.producer.schedule.settings import (
    TrainParallel,
    positive_setting,
    read_train_parallel,
    setting,
    whole_numbers,
)
from rollcast.schemas.sizes import counted


def pack_step_into_mbs(args: Any, train_parallel_config: Any, lengths: Sequence[int]) -> list[list[int]]:
    """Returns the micro-batches of one step over all ranks, as lists of indices into `lengths`.

    Their number is a multiple of `dp_size` (times `microbatch_group_size_per_vp_stage` where `vpp_size` is above 1).

    With `args.use_dynamic_batch_size`, each sample in turn goes to the first micro-batch that has room for it. Room is
    `args.max_tokens_per_gpu * cp_size` tokens; a longer sample is alone. With `args.balance_by_flops` as well, room is
    the estimated forward FLOPs of one sample of that many tokens: attention is quadratic, so a micro-batch of short
    samples then holds more tokens than that, and memory must allow for it. Micro-batches that are missing for the
    multiple are made by cutting the largest ones in two.

    Otherwise a micro-batch is the next `args.micro_batch_size` samples, and `args.balance_by_flops` means nothing.

    Args:
        args: the trainer's settings, by attribute or key.
        train_parallel_config: `dp_size`, `cp_size`, `vpp_size`, `microbatch_group_size_per_vp_stage`, likewise.
        lengths: tokens of each sample of the step, prompt included.

    Raises:
        ScheduleError: a setting is absent or wrong, or the multiple cannot be reached.
    """
    parallel = read_train_parallel(train_parallel_config)
    weights = whole_numbers("lengths", lengths)
    if not weights:
        raise ScheduleError("the step has no samples; leave it out of the schedule")
    if not setting(args, "use_dynamic_batch_size"):
        return _pack_by_count(len(weights), positive_setting(args, "micro_batch_size"), parallel)
    capacity = positive_setting(args, "max_tokens_per_gpu") * parallel.cp_size
    if setting(args, "balance_by_flops"):
        shape = read_model_shape(args)
        weights = [shape.forward_flops(length) for length in weights]
        capacity = shape.forward_flops(capacity)
    return _split_to_multiple(first_fit_pack(weights, capacity), weights, parallel)


def first_fit_pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Returns bins of indices into `lengths`, each at most `capacity` in sum; a larger one is alone in its bin.

    Every index goes, in order, to the first bin that has room for it.
    """
    bins: list[list[int]] = []
    leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    # A tree, because looking at one bin after the other is quadratic: from entry `leaves` on the room of each bin, also
    # of those not opened yet, and in each entry before, the most room below it.
    room = [capacity] * (2 * leaves)
    for index, length in enumerate(lengths):
        node = 1
        if length > room[node]:
            node = leaves + len(bins)
        while node < leaves:
            node = 2 * node if length <= room[2 * node] else 2 * node + 1
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(index)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def _pack_by_count(samples: int, micro_batch_size: int, parallel: TrainParallel) -> list[list[int]]:
    micro_batches = [
        list(range(start, min(start + micro_batch_size, samples))) for start in range(0, samples, micro_batch_size)
    ]
    if len(micro_batches) % parallel.micro_batch_multiple:
        raise ScheduleError(
            f"{counted(samples, 'sample')} cut into {counted(len(micro_batches), 'micro-batch', 'micro-batches')} of "
            f"{micro_batch_size}, which is not a multiple of {parallel.describe_multiple()}: change "
            "args.micro_batch_size or global_batch_size, or set args.use_dynamic_batch_size"
        )
    return micro_batches


def _split_to_multiple(bins: list[list[int]], weights: Sequence[int], parallel: TrainParallel) -> list[list[int]]:
    """Returns the bins with the heaviest ones cut in two until their number is right; second halves come last."""
    multiple = parallel.micro_batch_multiple
    target = -(-len(bins) // multiple) * multiple
    samples = len(weights)
    if target > samples:
        raise ScheduleError(
            f"{counted(samples, 'sample')} packed into {counted(len(bins), 'micro-batch', 'micro-batches')} cannot be "
            f"split into {target}, a multiple of "
            f"{parallel.describe_multiple()}: raise global_batch_size or args.max_tokens_per_gpu, or lower dp_size"
        )
    bins = list(bins)
    heap: list[tuple[int, int]] = []

    def offer(place: int) -> None:
        if len(bins[place]) > 1:
            heapq.heappush(heap, (-sum(weights[index] for index in bins[place]), place))

    for place in range(len(bins)):
        offer(place)
    while len(bins) < target:
        _, place = heapq.heappop(heap)
        first, second = _halves(bins[place], weights)
        bins[place] = first
        bins.append(second)
        offer(place)
        offer(len(bins) - 1)
    return bins


def _halves(indices: list[int], weights: Sequence[int]) -> tuple[list[int], list[int]]:
    """Cuts where the heavier side is lightest."""
    sums = list(accumulate(weights[index] for index in indices))
    cut = min(range(1, len(indices)), key=lambda cut: max(sums[cut - 1], sums[-1] - sums[cut - 1]))
    return indices[:cut], indices[cut:]
