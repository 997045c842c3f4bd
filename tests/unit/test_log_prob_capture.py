"""Capturing log-probs during training."""

from typing import Any

import pytest
import torch

from rollcast.producer import (
    capture_log_probs,
    drain_captured_log_probs,
    enable_log_prob_capture,
    maybe_capture_log_probs,
)
from rollcast.producer.errors import RolloutDataError


def _batch(*positions: int) -> dict[str, Any]:
    return {"partition": list(positions)}


def test_nothing_is_captured_unless_enabled() -> None:
    maybe_capture_log_probs({}, [torch.zeros(1)])
    assert drain_captured_log_probs() == {}


def test_captures_are_detached_copies_and_the_first_occurrence_wins() -> None:
    enable_log_prob_capture()
    first = torch.ones(2, requires_grad=True)
    maybe_capture_log_probs(_batch(4, 2), [first, torch.zeros(1)])
    maybe_capture_log_probs(_batch(4), [torch.full((2,), 9.0)])
    with torch.no_grad():
        first.fill_(5.0)
    captured = drain_captured_log_probs()
    assert list(captured) == [4, 2]
    assert captured[4].tolist() == [1.0, 1.0]
    assert not captured[4].requires_grad
    maybe_capture_log_probs(_batch(7), [torch.zeros(1)])
    assert drain_captured_log_probs() == {}


def test_the_result_is_placed_in_partition_order() -> None:
    with capture_log_probs() as captured:
        maybe_capture_log_probs(_batch(1), [torch.tensor([1.0])])
        maybe_capture_log_probs({"partition": torch.tensor([3, 0])}, [torch.tensor([3.0]), torch.tensor([0.0])])
    data: dict[str, Any] = {"partition": [0, 1, 3]}
    captured.place_into(data)
    assert [tensor.item() for tensor in data["log_probs"]] == [0.0, 1.0, 3.0]


def test_no_state_is_left_behind_when_training_raises() -> None:
    def train() -> None:
        with capture_log_probs():
            maybe_capture_log_probs(_batch(1), [torch.zeros(1)])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    maybe_capture_log_probs({}, [torch.zeros(1)])
    assert drain_captured_log_probs() == {}


@pytest.mark.parametrize("batch", [{}, _batch(1, 2), {"partition": [None]}])
def test_a_batch_without_one_position_per_tensor_is_refused(batch: dict[str, Any]) -> None:
    with capture_log_probs(), pytest.raises(RolloutDataError, match="one position per tensor"):
        maybe_capture_log_probs(batch, [torch.zeros(1)])


@pytest.mark.parametrize(("data", "words"), [({}, "no 'partition'"), ({"partition": [1, 8]}, "first: 8")])
def test_positions_that_were_not_captured_are_named(data: dict[str, Any], words: str) -> None:
    with capture_log_probs() as captured:
        maybe_capture_log_probs(_batch(1), [torch.zeros(1)])
    with pytest.raises(RolloutDataError, match=words):
        captured.place_into(data)
