"""Shards on a CUDA device; runs where there is one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fixtures.rollouts import payload_in_spool, whole_shard
from rollcast.consumer.difference import differences
from rollcast.producer import Publisher, PublisherConfig
from rollcast.producer.mover import can_pin, move, pin, unpin
from rollcast.producer.plan import Copies
from rollcast.producer.spool.folder import SpoolFolder
from rollcast.producer.spool.pool import TensorPool
from rollcast.producer.spool.tensor_file import TensorFiles
from rollcast.schemas import build_dump_payload

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")


def _on_device(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cuda()
    return [_on_device(item) for item in value] if isinstance(value, list) else value


def test_a_shard_on_the_device_is_bit_equal_and_its_memory_may_be_reused(tmp_path: Path) -> None:
    publisher = Publisher(
        PublisherConfig(
            run_id="run", spool_dir=tmp_path, bootstrap_servers="127.0.0.1:1", start_shipper=False, strict=True
        )
    )
    spool = SpoolFolder(tmp_path)
    # The second rollout goes into a recycled file, whose pages are registered by then.
    for rollout_id in range(3):
        shard = whole_shard(rollout_id, 0, 1)
        shard["strided"] = [torch.arange(20).reshape(4, 5).T for _ in shard["tokens"]]
        on_device = {name: _on_device(value) for name, value in shard.items()}
        # Work that is still going on when `publish` is called: the copies must wait for it.
        busy = torch.ones(2048, 2048, device="cuda")
        for _ in range(50):
            busy = busy @ busy * 1e-4
        on_device["log_probs"] = [tensor + busy[0, 0] * 0 for tensor in on_device["log_probs"]]
        publisher.publish(rollout_id, on_device)
        for tensor in on_device["log_probs"]:
            tensor.fill_(float("nan"))
        while not spool.bundles():
            pass
        direct = build_dump_payload(
            [{"rank": 0, "data_parallel_rank": 0, "rollout_data": shard}], rollout_id=rollout_id, writer_rank=0
        )
        assert not differences(payload_in_spool(tmp_path, rollout_id), direct)
        ((_, path),) = spool.bundles()
        spool.retire(path)
    publisher.close(0.2)


def _whole(size: int) -> Copies:
    zero = np.zeros(1, np.int64)
    return Copies(zero, zero, np.array([size], np.int64))


def test_memory_is_registered_once_a_shard_has_come_from_the_device() -> None:
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    move((torch.arange(16, dtype=torch.uint8).cuda(),), _whole(16), memory)
    assert memory[:16].tolist() == list(range(16))
    assert can_pin()
    assert pin(memory)
    assert memory.is_pinned()
    unpin(memory.data_ptr())
    assert not memory.is_pinned()


def test_what_the_device_writes_to_a_registered_file_is_in_the_file_however_its_size_changes(tmp_path: Path) -> None:
    pool = TensorPool(tmp_path / "pool")
    files = TensorFiles(pool)
    for size in (8 << 20, 4 << 20, 6 << 20, 7 << 20, 3 << 20, 9 << 20):
        source = torch.randint(256, (size,), dtype=torch.uint8).cuda()
        file = files.open(tmp_path / "tensors", 64, size)
        move((source,), _whole(size), file.data)
        file.close()
        assert (tmp_path / "tensors").read_bytes()[64:] == source.cpu().numpy().tobytes()
        pool.give(tmp_path / "tensors")
        files.prefault()
