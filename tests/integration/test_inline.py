"""The inline dump: one file, whole or not there."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fixtures.rollouts import whole_shard
from rollcast.consumer.difference import differences
from rollcast.producer import ProducerError, save_debug_train_data
from rollcast.producer.errors import RolloutDataError
from rollcast.schemas import build_dump_payload


def test_nothing_is_written_unless_asked_for(tmp_path: Path) -> None:
    save_debug_train_data(SimpleNamespace(save_debug_train_data=None), rollout_id=0, rollout_data={})
    assert not list(tmp_path.iterdir())


def test_the_template_names_rollout_and_rank(tmp_path: Path) -> None:
    args = SimpleNamespace(save_debug_train_data=str(tmp_path / "new" / "{rollout_id}-{rank}.pt"))
    shard = whole_shard(3, 0, 1)
    save_debug_train_data(args, rollout_id=7, rollout_data=shard)
    (path,) = (tmp_path / "new").iterdir()
    assert path.name == "7-0.pt"
    own = {"rank": 0, "data_parallel_rank": 0, "rollout_data": shard}
    assert not differences(torch.load(path, weights_only=True), build_dump_payload([own], rollout_id=7, writer_rank=0))


def test_without_context_parallelism_no_total_lengths_are_asked_for(tmp_path: Path) -> None:
    args = SimpleNamespace(save_debug_train_data=str(tmp_path / "{rollout_id}.pt"))
    shard = whole_shard(0, 0, 1)
    del shard["total_lengths"]
    save_debug_train_data(args, rollout_id=0, rollout_data=shard)
    own = {"rank": 0, "data_parallel_rank": 0, "rollout_data": shard}
    written = torch.load(tmp_path / "0.pt", weights_only=True)
    assert not differences(written, build_dump_payload([own], rollout_id=0, writer_rank=0))


def test_a_template_without_the_rollout_is_refused(tmp_path: Path) -> None:
    args = SimpleNamespace(save_debug_train_data=str(tmp_path / "dump.pt"))
    with pytest.raises(ProducerError, match=r"without \{rollout_id\} each rollout would overwrite"):
        save_debug_train_data(args, rollout_id=0, rollout_data=whole_shard(0, 0, 1))


def test_a_gather_of_the_callers_own_restores_tensor_by_tensor(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []

    def gather(tensor: torch.Tensor, total_length: int, response_length: int) -> torch.Tensor:
        calls.append((total_length, response_length))
        return tensor

    args = SimpleNamespace(save_debug_train_data=str(tmp_path / "{rollout_id}.pt"))
    shard = whole_shard(0, 0, 1)
    save_debug_train_data(args, rollout_id=0, rollout_data=shard, gather_tensor=gather)
    lengths = list(zip(shard["total_lengths"], shard["response_lengths"], strict=True))
    assert calls == 4 * lengths


def test_a_folder_that_cannot_be_written_and_misaligned_data_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    args = SimpleNamespace(save_debug_train_data=str(tmp_path / "file" / "{rollout_id}.pt"))
    with pytest.raises(ProducerError, match="cannot be written"):
        save_debug_train_data(args, rollout_id=0, rollout_data=whole_shard(0, 0, 1))
    args = SimpleNamespace(save_debug_train_data=str(tmp_path / "{rollout_id}.pt"))
    with pytest.raises(RolloutDataError, match="one tensor per sample"):
        save_debug_train_data(args, rollout_id=0, rollout_data=whole_shard(0, 0, 1) | {"kl": []})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
