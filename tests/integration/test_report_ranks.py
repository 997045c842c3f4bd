"""Reports on real ranks: the same numbers and gradients for every layout and partition, and nobody waits in vain."""

import math
from typing import Any, TypeAlias

import pytest

from fixtures.ranks import Grid, run_ranks
from fixtures.report_programs import in_every_layout, reports_of_every_partition, reports_with_a_broken_rank

pytestmark = pytest.mark.timeout(200)

LAYOUTS = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)]

EightRanks: TypeAlias = list[dict[tuple[int, int], dict[str, Any]]]
"""What each rank reported in each layout."""


@pytest.fixture(scope="module")
def eight_ranks() -> EightRanks:
    return run_ranks(Grid(world=8), in_every_layout, 8, reports_of_every_partition)


def _assert_reports(
    eight_ranks: EightRanks,
    layout: tuple[int, int],
    name: str,
    *,
    per_rollout: float,
    per_token: float,
    masked_sum: float,
) -> None:
    reports = [rank[layout][name] for rank in eight_ranks]
    assert [report["per rollout"] for report in reports] == [{per_rollout}] * 8
    assert [report["per token"] for report in reports] == [{per_token}] * 8
    # One source for each tensor-parallel rank.
    sources = 8 // (layout[0] * layout[1])
    assert [report["logged"] for report in reports] == [{per_rollout}] * sources + [None] * (8 - sources)
    assert [report["sums"] for report in reports] == [{masked_sum}] * sources + [None] * (8 - sources)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rollout_split_into_samples_reports_the_same_for_every_partition(
    eight_ranks: EightRanks, layout: tuple[int, int]
) -> None:
    for name in ("compact", "compact bshd"):
        _assert_reports(eight_ranks, layout, name, per_rollout=8.0, per_token=6.5, masked_sum=78.0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_responses_of_different_lengths_report_the_same_for_every_partition(
    eight_ranks: EightRanks, layout: tuple[int, int]
) -> None:
    _assert_reports(eight_ranks, layout, "ragged", per_rollout=3.0, per_token=2.0, masked_sum=8.0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_tokens_under_the_mask_count(eight_ranks: EightRanks, layout: tuple[int, int]) -> None:
    _assert_reports(eight_ranks, layout, "masked", per_rollout=1.0, per_token=1.0, masked_sum=10.0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_of_a_one_weight_model_is_the_same_for_every_layout(
    eight_ranks: EightRanks, layout: tuple[int, int]
) -> None:
    for rank in eight_ranks:
        assert rank[layout]["gradients"] == {(False, 2 * 1.5 * 8.0), (True, 2 * 1.5 * 6.5)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_context_parallel_ranks_hold_parts_of_the_responses(eight_ranks: EightRanks, layout: tuple[int, int]) -> None:
    data, context = layout
    tensor = 8 // (data * context)
    # Ranks in megatron-core's order: tensor-parallel peers first, context-parallel ones next.
    peers = [eight_ranks[index * tensor][layout]["held"] for index in range(context)]
    assert [sum(held) for held in zip(*peers, strict=True)] == [3, 3, 3, 3]
    if context > 1:
        assert any(sum(tokens > 0 for tokens in held) > 1 for held in zip(*peers, strict=True))


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, Any]]:
    return run_ranks(Grid(world=4, context=2), reports_with_a_broken_rank)


def test_metrics_of_different_ranks_are_united_each_with_its_own_count(four_ranks: list[dict[str, Any]]) -> None:
    assert four_ranks[0]["different keys"] == {
        "all": 1.5,
        "plain": 1.5,
        "three": 1.0,
        **{f"only {rank}": 3.0 for rank in range(4)},
    }
    assert [rank["different keys"] for rank in four_ranks[1:]] == [None] * 3


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("words", ["rank 2", "'reward'", "'high'"]),
        ("half a pair", ["rank 2", "'reward'", "(1.0, None)"]),
        ("plain or pair", ["rank 2", "'reward'", "a plain value"]),
    ],
)
def test_a_bad_value_in_the_log_of_one_rank_is_an_error_on_all(
    four_ranks: list[dict[str, Any]], case: str, words: list[str]
) -> None:
    for rank in four_ranks:
        assert all(word in rank[case] for word in words), rank[case]


def test_a_rank_without_a_micro_batch_is_an_error_on_all(four_ranks: list[dict[str, Any]]) -> None:
    messages = [rank["no micro-batch"] for rank in four_ranks]
    assert "losses_reduced is empty" in messages[2]
    assert all("rank 2 has unusable losses_reduced" in messages[rank] for rank in (0, 1, 3))


def test_metric_keys_that_differ_among_ranks_in_training_are_an_error_on_all(four_ranks: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(four_ranks):
        assert f"rank {number} has ['loss'" in rank["other keys"]
        assert "in different order" in rank["other order"]


def test_after_an_error_the_ranks_report_on(four_ranks: list[dict[str, Any]]) -> None:
    assert [rank["whole again"] for rank in four_ranks] == [{"loss": 2.0}] * 4
    assert max(rank["seconds"] for rank in four_ranks) < 20


def test_a_nan_on_one_rank_stays_within_its_metric(four_ranks: list[dict[str, Any]]) -> None:
    for rank in four_ranks:
        assert math.isnan(rank["not a number"]["loss"])
        assert rank["not a number"]["kl"] == 4.0


def test_a_step_without_a_token_under_the_mask_has_no_metric_per_token(four_ranks: list[dict[str, Any]]) -> None:
    assert [rank["all masked"] for rank in four_ranks] == [{}] * 4
