"""One step's packing: first fit, splitting up to the multiple, FLOPs as weights, and the cost of a sample."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollcast.producer.schedule import ScheduleError, first_fit_pack, pack_step_into_mbs
from rollcast.producer.schedule.flops import read_model_shape

# Time says nothing here: other processes may have the machine.
_properties = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def _model(**changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 16, "vocab_size": 10, "num_layers": 3}
    return sizes | changes


def _dynamic(max_tokens_per_gpu: int, **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(use_dynamic_batch_size=True, max_tokens_per_gpu=max_tokens_per_gpu, **changes)


@pytest.mark.parametrize(
    ("lengths", "bins"),
    [
        ([], []),
        ([4, 6, 5, 5, 1], [[0, 1], [2, 3], [4]]),
        ([6, 5, 4, 5], [[0, 2], [1, 3]]),
        ([11, 0, 3], [[0], [1, 2]]),
        ([3, 25, 4, 10], [[0, 2], [1], [3]]),
    ],
)
def test_each_sample_goes_to_the_first_bin_with_room(lengths: list[int], bins: list[list[int]]) -> None:
    assert first_fit_pack(lengths, 10) == bins


@_properties
@given(st.lists(st.integers(0, 15), max_size=20), st.integers(1, 12))
def test_no_two_neighbouring_bins_could_have_been_one(lengths: list[int], capacity: int) -> None:
    bins = first_fit_pack(lengths, capacity)
    assert sorted(index for bin_ in bins for index in bin_) == list(range(len(lengths)))
    sums = [sum(lengths[index] for index in bin_) for bin_ in bins]
    assert all(total <= capacity or len(bin_) == 1 for total, bin_ in zip(sums, bins, strict=True))
    assert all(first + second > capacity for first, second in pairwise(sums))


def _one_bin_after_the_other(lengths: list[int], capacity: int) -> list[list[int]]:
    """First fit as it is defined."""
    bins: list[list[int]] = []
    for index, length in enumerate(lengths):
        fitting = (bin_ for bin_ in bins if sum(lengths[other] for other in bin_) + length <= capacity)
        found = next(fitting, None)
        if found is None:
            bins.append([index])
        else:
            found.append(index)
    return bins


@_properties
@given(st.lists(st.integers(0, 15), max_size=70), st.integers(1, 40))
def test_the_bins_are_those_of_looking_at_one_after_the_other(lengths: list[int], capacity: int) -> None:
    assert first_fit_pack(lengths, capacity) == _one_bin_after_the_other(lengths, capacity)


class _CountingInt(int):
    """An integer that counts its comparisons."""

    comparisons = 0

    def __le__(self, other: int) -> bool:
        _CountingInt.comparisons += 1
        return int(self) <= other

    def __gt__(self, other: int) -> bool:
        _CountingInt.comparisons += 1
        return int(self) > other


def test_packing_thousands_of_samples_does_not_look_at_each_bin_for_each_sample() -> None:
    count = 8192
    _CountingInt.comparisons = 0
    assert len(first_fit_pack([_CountingInt(10)] * count, 10)) == count
    assert _CountingInt.comparisons < 20 * count


def test_context_parallel_ranks_share_a_micro_batch_so_it_holds_more_tokens() -> None:
    assert pack_step_into_mbs(_dynamic(10), {"dp_size": 1, "cp_size": 1}, [10, 10]) == [[0], [1]]
    assert pack_step_into_mbs(_dynamic(10), {"dp_size": 1, "cp_size": 2}, [10, 10]) == [[0, 1]]


@pytest.mark.parametrize(
    ("lengths", "parallel", "micro_batches"),
    [
        # One bin of 12 in two; the cut is where the heavier side is lightest.
        ([1, 2, 3, 6], {"dp_size": 2}, [[0, 1, 2], [3]]),
        # The largest is split again and again, never a lone sample, however long it is.
        ([40, 5, 4, 3], {"dp_size": 4}, [[0], [1], [2], [3]]),
        # The larger of two bins.
        ([9, 8, 1, 2], {"dp_size": 3}, [[0], [1], [2, 3]]),
        # dp 2 in groups of 2 with virtual stages, in ones without.
        ([2, 2, 2, 2], {"dp_size": 2, "vpp_size": 2, "microbatch_group_size_per_vp_stage": 2}, [[0], [2], [1], [3]]),
        ([2, 2, 2, 2], {"dp_size": 2, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 2}, [[0, 1], [2, 3]]),
    ],
)
def test_missing_micro_batches_come_from_the_largest(
    lengths: list[int], parallel: dict[str, int], micro_batches: list[list[int]]
) -> None:
    assert pack_step_into_mbs(_dynamic(12), parallel, lengths) == micro_batches


def test_micro_batches_that_samples_do_not_suffice_for_are_refused_with_the_whole_sum() -> None:
    parallel = {"dp_size": 2, "vpp_size": 2, "microbatch_group_size_per_vp_stage": 4}
    with pytest.raises(
        ScheduleError,
        match=r"3 samples packed into 1 micro-batch cannot be split into 8, a multiple of 8 "
        r"\(dp_size 2 x microbatch_group_size_per_vp_stage 4\): raise global_batch_size",
    ):
        pack_step_into_mbs(_dynamic(12), parallel, [1, 2, 3])


def test_fixed_size_micro_batches_are_chunks_in_order_and_must_fit_the_ranks() -> None:
    args = SimpleNamespace(use_dynamic_batch_size=False, micro_batch_size=2)
    assert pack_step_into_mbs(args, {"dp_size": 2}, [99, 1, 50, 7]) == [[0, 1], [2, 3]]
    with pytest.raises(ScheduleError, match=r"5 samples cut into 3 micro-batches of 2.* change args.micro_batch_size"):
        pack_step_into_mbs(args, {"dp_size": 2}, [1, 2, 3, 4, 5])


def test_a_step_without_samples_is_refused() -> None:
    with pytest.raises(ScheduleError, match="the step has no samples"):
        pack_step_into_mbs(_dynamic(12), {"dp_size": 1}, [])


def test_packing_by_flops_puts_more_tokens_together_the_shorter_the_samples_are() -> None:
    by_tokens, by_flops = _dynamic(1000), _dynamic(1000, balance_by_flops=True, **_model())
    assert pack_step_into_mbs(by_tokens, {"dp_size": 1}, [600, 600, 600]) == [[0], [1], [2]]
    assert pack_step_into_mbs(by_flops, {"dp_size": 1}, [600, 600, 600]) == [[0, 1], [2]]
    assert pack_step_into_mbs(by_tokens, {"dp_size": 1}, [250] * 8) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert pack_step_into_mbs(by_flops, {"dp_size": 1}, [250] * 8) == [list(range(8))]
    assert pack_step_into_mbs(by_flops, {"dp_size": 1}, [1000, 1, 1001, 1]) == [[0], [1, 3], [2]]


def test_the_flops_of_a_sample_are_the_sum_over_its_matrix_products() -> None:
    shape = read_model_shape(SimpleNamespace(**_model(num_query_groups=1, kv_channels=5)))
    length, hidden, query, key = 7, 8, 2 * 5, 1 * 5
    queries = 2 * length * hidden * query
    keys_and_values = 2 * 2 * length * hidden * key
    output = 2 * length * query * hidden
    # Token i attends to i tokens: one product for the score, one for the value.
    attention = sum(2 * 2 * query * attended for attended in range(1, length + 1))
    mlp = 2 * 2 * length * hidden * 16
    logits = 2 * length * hidden * 10
    assert shape.forward_flops(length) == 3 * (queries + keys_and_values + output + attention + mlp) + logits


def test_attention_is_quadratic_and_everything_else_linear_in_the_length() -> None:
    flops = read_model_shape(SimpleNamespace(**_model())).forward_flops
    assert flops(0) == 0
    second_differences = {flops(n + 2) - 2 * flops(n + 1) + flops(n) for n in range(20)}
    assert second_differences == {3 * 2 * 2 * 8}


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"kv_channels": None, "num_query_groups": None}, {"kv_channels": 4, "num_query_groups": 2}),
        # Megatron's arguments say one group where every head has its own keys.
        ({"num_query_groups": 1, "group_query_attention": False}, {"num_query_groups": 2}),
        ({"swiglu": True, "ffn_hidden_size": 16}, {"ffn_hidden_size": 24}),
        # The router of two experts weighs as much as one unit of a two-matrix MLP.
        ({"num_experts": 2, "moe_router_topk": 1}, {"ffn_hidden_size": 17}),
        ({"num_experts": 2}, {"ffn_hidden_size": 33}),
        ({"num_experts": 2, "moe_router_topk": 2, "moe_ffn_hidden_size": 4}, {"ffn_hidden_size": 9}),
    ],
)
def test_megatrons_options_change_the_cost_as_they_change_the_model(
    left: dict[str, Any], right: dict[str, Any]
) -> None:
    costs = [read_model_shape(SimpleNamespace(**_model(**options))).forward_flops(11) for options in (left, right)]
    assert costs[0] == costs[1]
