"""The schedule of a rollout: its invariants as properties, its known answers, and what it refuses."""

from dataclasses import dataclass
from math import ceil
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from rollcast.producer.errors import ProducerError
from rollcast.producer.schedule import (
    ScheduleError,
    build_dp_schedule,
    compute_dynamic_global_batch_size,
    first_fit_pack,
)
from rollcast.producer.schedule.flops import read_model_shape
from rollcast.producer.schedule.steps import group_by_rollout

# Time says nothing here: other processes may have the machine.
_properties = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])

_MODEL = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_query_groups": 2,
    "kv_channels": 8,
    "ffn_hidden_size": 64,
    "vocab_size": 32,
    "num_layers": 2,
    "num_experts": None,
}


def _args(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**_MODEL | {"micro_batch_size": 1, "max_tokens_per_gpu": 10} | changes)


def _parallel(dp_size: int = 1, cp_size: int = 1, vpp_size: int = 1, group: int | None = None) -> dict[str, Any]:
    return {
        "dp_size": dp_size,
        "cp_size": cp_size,
        "vpp_size": vpp_size,
        "microbatch_group_size_per_vp_stage": group,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    args: SimpleNamespace
    parallel: dict[str, Any]
    lengths: list[int]
    rollouts: list[int]
    global_batch_size: int

    def build(self) -> tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]:
        return build_dp_schedule(
            self.args,
            self.parallel,
            self.lengths,
            global_batch_size=self.global_batch_size,
            rollout_indices=self.rollouts,
        )

    def steps(self) -> list[list[list[int]]]:
        groups = group_by_rollout(self.rollouts)
        size = self.global_batch_size
        return [groups[start : start + size] for start in range(0, len(groups) // size * size, size)]

    def has_enough_samples(self) -> bool:
        group = self.parallel["microbatch_group_size_per_vp_stage"] if self.parallel["vpp_size"] > 1 else 1
        multiple = self.parallel["dp_size"] * group
        for step in self.steps():
            samples = [sample for rollout in step for sample in rollout]
            bins = first_fit_pack([self.weight_of(self.lengths[sample]) for sample in samples], self.room)
            if len(samples) < ceil(len(bins) / multiple) * multiple:
                return False
        return True

    @property
    def room(self) -> int:
        return self.weight_of(self.args.max_tokens_per_gpu * self.parallel["cp_size"])

    def weight(self, samples: list[int]) -> int:
        return sum(self.weight_of(self.lengths[sample]) for sample in samples)

    def weight_of(self, length: int) -> int:
        by_flops = getattr(self.args, "balance_by_flops", False)
        return read_model_shape(self.args).forward_flops(length) if by_flops else length


@st.composite
def _dynamic_cases(draw: st.DrawFn) -> _Case:
    rollouts, lengths = zip(
        *draw(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=20)), strict=True
    )
    parallel = draw(st.sampled_from([(1, 1, 1), (2, 1, 1), (3, 2, 1), (1, 1, 2), (2, 2, 2)]))
    balance_data, balance_by_flops = draw(st.tuples(st.booleans(), st.booleans()))
    return _Case(
        args=_args(use_dynamic_batch_size=True, balance_data=balance_data, balance_by_flops=balance_by_flops),
        parallel=_parallel(*parallel, group=2),
        lengths=list(lengths),
        rollouts=list(rollouts),
        global_batch_size=draw(st.integers(1, len(set(rollouts)))),
    )


_CASES = _dynamic_cases().filter(_Case.has_enough_samples)


@_properties
@given(_dynamic_cases())
def test_a_step_is_refused_only_where_its_samples_do_not_suffice_for_the_micro_batches(case: _Case) -> None:
    event(f"enough samples: {case.has_enough_samples()}")
    if case.has_enough_samples():
        case.build()
    else:
        with pytest.raises(ScheduleError, match="cannot be split into"):
            case.build()


@_properties
@given(_CASES)
def test_every_sample_that_is_not_trimmed_is_trained_exactly_once(case: _Case) -> None:
    partitions, *_ = case.build()
    event(f"trimmed: {len(group_by_rollout(case.rollouts)) % case.global_batch_size > 0}")
    trained = sorted(sample for partition in partitions for sample in partition)
    assert trained == sorted(sample for step in case.steps() for group in step for sample in group)


@_properties
@given(_CASES)
def test_local_indices_put_one_after_the_other_count_up_to_the_end_of_the_partition(case: _Case) -> None:
    partitions, micro_batch_indices, *_ = case.build()
    for partition, micro_batches in zip(partitions, micro_batch_indices, strict=True):
        assert [place for places in micro_batches for place in places] == list(range(len(partition)))


@_properties
@given(_CASES)
def test_ranks_agree_on_micro_batches_and_a_step_trains_its_own_rollouts_only(case: _Case) -> None:
    partitions, micro_batch_indices, num_microbatches, global_batch_sizes = case.build()
    steps = case.steps()
    assert len(num_microbatches) == len(steps)
    assert global_batch_sizes == [case.global_batch_size] * len(steps)
    group = case.parallel["microbatch_group_size_per_vp_stage"] if case.parallel["vpp_size"] > 1 else 1
    assert all(count % group == 0 for count in num_microbatches)
    assert {len(micro_batches) for micro_batches in micro_batch_indices} == {sum(num_microbatches)}
    start = 0
    for count, step in zip(num_microbatches, steps, strict=True):
        trained = {
            partition[place]
            for partition, micro_batches in zip(partitions, micro_batch_indices, strict=True)
            for places in micro_batches[start : start + count]
            for place in places
        }
        assert trained == {sample for rollout in step for sample in rollout}
        start += count


@_properties
@given(_CASES)
def test_only_a_single_sample_may_exceed_the_room_of_a_micro_batch(case: _Case) -> None:
    partitions, micro_batch_indices, *_ = case.build()
    for partition, micro_batches in zip(partitions, micro_batch_indices, strict=True):
        for places in micro_batches:
            samples = [partition[place] for place in places]
            assert len(samples) == 1 or (samples and case.weight(samples) <= case.room)


@_properties
@given(_CASES)
def test_the_same_input_gives_the_same_schedule_and_stays_untouched(case: _Case) -> None:
    lengths, rollouts = list(case.lengths), list(case.rollouts)
    assert case.build() == case.build()
    assert (case.lengths, case.rollouts) == (lengths, rollouts)


def test_balance_by_flops_estimate_gives_the_published_split() -> None:
    partitions, micro_batch_indices, num_microbatches, global_batch_sizes = build_dp_schedule(
        _args(balance_data=True),
        _parallel(dp_size=2),
        [1, 2, 3, 4, 5, 7, 9, 10],
        global_batch_size=8,
        rollout_indices=None,
    )
    assert partitions == [[1, 2, 5, 6], [0, 3, 4, 7]]
    assert micro_batch_indices == [[[0], [1], [2], [3]]] * 2
    assert num_microbatches == [4]
    assert global_batch_sizes == [8]


def test_without_balance_micro_batches_are_strided_over_the_ranks_step_by_step() -> None:
    partitions, micro_batch_indices, num_microbatches, global_batch_sizes = build_dp_schedule(
        _args(micro_batch_size=2), _parallel(dp_size=2), [1] * 18, global_batch_size=8, rollout_indices=None
    )
    assert partitions == [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]
    assert micro_batch_indices == [[[0, 1], [2, 3], [4, 5], [6, 7]]] * 2
    assert num_microbatches == [2, 2]
    assert global_batch_sizes == [8, 8]


def test_samples_of_a_compact_rollout_meet_in_one_step_wherever_they_lie() -> None:
    partitions, _, num_microbatches, global_batch_sizes = build_dp_schedule(
        _args(), _parallel(), [1] * 7, global_batch_size=2, rollout_indices=[7, 3, 7, 5, 3, 9, 2]
    )
    assert partitions == [[0, 2, 1, 4, 3, 5]]
    assert num_microbatches == [4, 2]
    assert global_batch_sizes == [2, 2]


def test_the_parallel_config_may_be_an_object_and_may_leave_out_what_is_one() -> None:
    as_object = SimpleNamespace(dp_size=2, cp_size=1, vpp_size=None, microbatch_group_size_per_vp_stage=None)
    schedules = [
        build_dp_schedule(_args(), config, [1, 2, 3, 4], global_batch_size=4, rollout_indices=None)
        for config in (as_object, {"dp_size": 2}, _parallel(dp_size=2))
    ]
    assert schedules[0] == schedules[1] == schedules[2]


@pytest.mark.parametrize(
    ("args", "parallel", "arguments", "words"),
    [
        ({}, {"dp_size": 1}, {"global_batch_size": 5}, r"4 rollouts cannot fill one step of global_batch_size 5"),
        ({}, {"dp_size": 1}, {"global_batch_size": 0}, r"build_dp_schedule.global_batch_size is 0"),
        ({}, {"dp_size": 1}, {"rollout_indices": [0]}, r"rollout_indices has 1 entry and total_lengths 4"),
        ({}, {"dp_size": 1}, {"rollout_indices": [0, 1, 2, None]}, r"rollout_indices\[3\] is None"),
        ({}, {"dp_size": 1}, {"total_lengths": [1, 2.5, 3, 4]}, r"total_lengths\[1\] is 2.5"),
        ({}, {}, {}, r"train_parallel_config.dp_size is None"),
        ({}, {"dp_size": 1, "vpp_size": 2}, {}, r"microbatch_group_size_per_vp_stage is None"),
        ({}, {"dp_size": 3}, {}, r"step 0 \(4 rollouts\): 4 samples cut into 4 .* change args.micro_batch_size"),
        ({"micro_batch_size": None}, {"dp_size": 1}, {}, r"args.micro_batch_size is None"),
        ({"balance_data": True, "hidden_size": None}, {"dp_size": 1}, {}, r"args.hidden_size is None"),
        ({"use_dynamic_batch_size": True}, {"dp_size": 8}, {}, r"cannot be split into 8.* raise global_batch_size"),
    ],
)
def test_what_cannot_be_scheduled_is_refused_with_place_and_remedy(
    args: dict[str, Any], parallel: dict[str, Any], arguments: dict[str, Any], words: str
) -> None:
    call: dict[str, Any] = {"total_lengths": [1, 2, 3, 4], "global_batch_size": 4, "rollout_indices": None} | arguments
    with pytest.raises(ScheduleError, match=words):
        build_dp_schedule(_args(**args), parallel, **call)


def test_a_schedule_error_is_one_of_ours_and_a_value_error() -> None:
    assert issubclass(ScheduleError, ProducerError)
    assert issubclass(ScheduleError, ValueError)


@pytest.mark.parametrize(("samples", "size"), [(0, 4), (3, 4), (4, 4), (7, 4), (8, 8), (1023, 1020)])
def test_the_dynamic_batch_size_is_the_largest_multiple_of_the_ranks_and_never_none(samples: int, size: int) -> None:
    assert compute_dynamic_global_batch_size(_args(), _parallel(dp_size=4), samples) == size
