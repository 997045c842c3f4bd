"""The demo's toy task, its rollouts, and the records that each rank makes of them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from rollcast_demo import task
from rollcast_demo.layout import LAYOUTS, WORLD_SIZE, Layout, response_spans, take_spans
from rollcast_demo.learner import Learner
from rollcast_demo.records import Place, Records, build_records, shard_positions
from rollcast_demo.rollout import GROUP_SIZE, RolloutEngine, Sample

_PER_TOKEN_COLUMNS = (
    "rollout_log_probs", "log_probs", "ref_log_probs", "kl", "entropy", "advantages", "returns"
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rollout:
    learner: Learner
    samples: list[Sample]


@pytest.fixture(scope="module")
def rollout() -> _Rollout:
    learner = Learner(seed=3, learning_rate=1e-3)
    return _Rollout(learner=learner, samples=RolloutEngine(seed=3).generate(learner.model))


def _records(
    rollout: _Rollout, *, data_rank: int = 0, data_size: int = 1, context_rank: int = 0, context_size: int = 1
) -> Records:
    place = Place(
        data_rank=data_rank,
        data_size=data_size,
        context_rank=context_rank,
        context_size=context_size,
        first_sample=100,
        first_rollout=50,
    )
    return build_records(rollout.samples, rollout.learner.score(_shard(rollout, data_rank, data_size)), place)


def _shard(rollout: _Rollout, data_rank: int, data_size: int) -> list[Sample]:
    positions = shard_positions(len(rollout.samples), data_rank=data_rank, data_size=data_size)
    return [rollout.samples[position] for position in positions]


def _gradient(rollout: _Rollout, *, data_size: int, context_size: int) -> torch.Tensor:
    """Add up the gradients of all ranks of a layout, as the all-reduce does."""
    parameters = list(rollout.learner.model.parameters())
    for parameter in parameters:
        parameter.grad = None
    for data_rank in range(data_size):
        shard = _shard(rollout, data_rank, data_size)
        for context_rank in range(context_size):
            records = _records(
                rollout,
                data_rank=data_rank,
                data_size=data_size,
                context_rank=context_rank,
                context_size=context_size,
            )
            for slots in records.micro_batches:
                rollout.learner.accumulate(
                    [shard[slot] for slot in slots], [records.loss_terms[slot] for slot in slots]
                )
    return torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])


@pytest.mark.parametrize(
    ("waypoints", "prompt", "answer"),
    [
        ([3, 6, 5], "3>6>5=", "34565"),
        ([7, 2], "7>2=", "765432"),
        ([4, 4, 4], "4>4>4=", "4"),
        ([9], "9=", "9"),
    ],
)
def test_a_walk_visits_every_digit_between_its_waypoints(waypoints: list[int], prompt: str, answer: str) -> None:
    assert task.walk(waypoints) == task.Problem(prompt=prompt, answer=answer)


@pytest.mark.parametrize(
    ("response", "reward"),
    [("3456$", 1.0), ("3456", 0.8), ("34", 0.4), ("35$", 0.2), ("34567890", 0.5), ("$", 0.0), ("", 0.0)],
)
def test_the_reward_is_the_share_of_the_right_beginning(response: str, reward: float) -> None:
    assert task.score(task.walk([3, 6]), response) == pytest.approx(reward)


def test_text_comes_back_from_its_token_ids() -> None:
    assert task.decode(task.encode("3>6=3456$")) == "3>6=3456$"


@pytest.mark.parametrize(
    ("total_length", "response_length", "spans_of_ranks"),
    [
        (8, 6, [[(0, 1), (5, 6)], [(1, 3), (3, 5)]]),
        (16, 2, [[(0, 2)], []]),
        (4, 0, [[], []]),
        (2, 1, [[(0, 1)], []]),
    ],
)
def test_zigzag_spans_are_those_of_the_known_cases(
    total_length: int, response_length: int, spans_of_ranks: list[list[tuple[int, int]]]
) -> None:
    assert [
        response_spans(total_length=total_length, response_length=response_length, context_rank=rank, context_size=2)
        for rank in range(2)
    ] == spans_of_ranks


@pytest.mark.parametrize("context_size", [1, 2, 4])
def test_the_spans_of_all_ranks_tile_the_response(context_size: int) -> None:
    for total_length in range(2, 20):
        for response_length in range(total_length):
            spans = [
                span
                for rank in range(context_size)
                for span in response_spans(
                    total_length=total_length,
                    response_length=response_length,
                    context_rank=rank,
                    context_size=context_size,
                )
            ]
            held = sorted(token for start, stop in spans for token in range(start, stop))
            assert held == list(range(response_length))


def test_the_layouts_fill_the_world_and_are_named_by_their_sizes() -> None:
    assert [layout.name for layout in LAYOUTS] == ["tp2-pp2-cp2-dp1", "pp2-cp2-dp2"]
    assert all(layout.tensor * layout.pipeline * layout.context * layout.data == WORLD_SIZE for layout in LAYOUTS)
    assert Layout(tensor=1, pipeline=1, context=1).data == WORLD_SIZE


def test_a_rollout_holds_truncated_withheld_and_compact_samples(rollout: _Rollout) -> None:
    samples = rollout.samples
    assert any(sample.truncated for sample in samples)
    assert any(sample.removed for sample in samples)
    assert len({sample.rollout for sample in samples}) == len(task.PROBLEMS) * GROUP_SIZE < len(samples)
    assert all(len(sample.log_probs) == sample.response_length > 0 for sample in samples)


def test_a_continuation_starts_where_the_truncated_response_ended(rollout: _Rollout) -> None:
    continued = [
        (first, second)
        for first, second in zip(rollout.samples, rollout.samples[1:], strict=False)
        if first.rollout == second.rollout
    ]
    assert continued
    for first, second in continued:
        assert first.truncated
        assert second.tokens[: len(second.tokens) - second.response_length] == first.tokens


def test_some_context_parallel_rank_holds_no_response_token_of_some_sample(rollout: _Rollout) -> None:
    terms = [term for rank in range(2) for term in _records(rollout, context_rank=rank, context_size=2).loss_terms]
    assert any(not term.spans for term in terms)
    assert any(len(term.spans) == 2 for term in terms)


def test_context_parallel_ranks_hold_disjoint_pieces_of_one_response(rollout: _Rollout) -> None:
    whole = _records(rollout).rollout_data
    pieces = [_records(rollout, context_rank=rank, context_size=2) for rank in range(2)]
    for name in _PER_TOKEN_COLUMNS:
        for slot, values in enumerate(whole[name]):
            assert values.dtype == torch.float32
            for piece in pieces:
                held = take_spans(values, piece.loss_terms[slot].spans)
                torch.testing.assert_close(piece.rollout_data[name][slot], held, rtol=0, atol=0)
            assert sum(len(piece.rollout_data[name][slot]) for piece in pieces) == len(values)


def test_data_parallel_shards_cover_the_rollout_with_equally_many_micro_batches(rollout: _Rollout) -> None:
    shards = [_records(rollout, data_rank=rank, data_size=2).rollout_data for rank in range(2)]
    assert sorted(shards[0]["partition"] + shards[1]["partition"]) == list(range(len(rollout.samples)))
    assert shards[0]["num_microbatches"] == shards[1]["num_microbatches"]
    for shard in shards:
        count = len(shard["partition"])
        assert [slot for slots in shard["micro_batch_indices"] for slot in slots] == list(range(count))
        assert shard["sample_indices"] == [100 + position for position in shard["partition"]]
        assert shard["raw_reward"] == [sample.reward for sample in rollout.samples]
        for name in ("tokens", "total_lengths", "response_lengths", "loss_masks", "rewards", "truncated"):
            assert len(shard[name]) == count


def test_a_withheld_sample_has_a_mask_of_zeros(rollout: _Rollout) -> None:
    masks = _records(rollout).rollout_data["loss_masks"]
    for sample, mask in zip(rollout.samples, masks, strict=True):
        assert mask.dtype == torch.int32
        assert mask.tolist() == [0 if sample.removed else 1] * sample.response_length


def test_returns_are_rewards_normalized_inside_each_group(rollout: _Rollout) -> None:
    returns = _records(rollout).rollout_data["returns"]
    of_rollout = {
        (sample.problem, sample.rollout): float(values[0])
        for sample, values in zip(rollout.samples, returns, strict=True)
    }
    for problem in range(len(task.PROBLEMS)):
        group = [value for (of_problem, _), value in of_rollout.items() if of_problem == problem]
        assert len(group) == GROUP_SIZE
        assert sum(group) == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize(("data_size", "context_size"), [(1, 2), (2, 1), (2, 2), (3, 4)])
def test_the_gradient_does_not_depend_on_the_layout(rollout: _Rollout, data_size: int, context_size: int) -> None:
    alone = _gradient(rollout, data_size=1, context_size=1)
    together = _gradient(rollout, data_size=data_size, context_size=context_size)
    assert alone.abs().max() > 0
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-6)
