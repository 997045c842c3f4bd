"""Tensor files of bundles: room reserved, within the quota, recycled without a trace of what was in them."""

from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from fixtures.publishers import spool_publisher, spool_session
from fixtures.rollouts import context_parallel_share, payload_in_spool, whole_shard
from rollcast.consumer.difference import differences
from rollcast.producer import PublishStatus
from rollcast.producer.copy import copy_own
from rollcast.producer.errors import SpoolFullError
from rollcast.producer.parallel import ParallelLayout
from rollcast.producer.plan import make_plan
from rollcast.producer.spool.folder import BundleName, SpoolFolder
from rollcast.producer.spool.pool import TensorPool
from rollcast.producer.spool.tensor_file import finish_tensor_file
from rollcast.schemas import build_dump_payload


def test_a_full_disk_is_an_error_at_creation_and_not_a_signal_later(tmp_path: Path) -> None:
    session = spool_session(tmp_path)
    plan = make_plan(whole_shard(0, 0, 1), ParallelLayout())
    with pytest.raises(SpoolFullError, match="no room for"):
        session.start_bundle(BundleName(0, 1, "dp0"), replace(plan, data_bytes=2**50))
    assert not list(tmp_path.rglob("*.filling"))


@pytest.mark.parametrize("target", ["link", "gone", ".host-token/below"])
def test_a_link_that_leads_nowhere_keeps_no_bundle_from_being_found(tmp_path: Path, target: str) -> None:
    publisher = spool_publisher(tmp_path)
    assert publisher.publish(0, whole_shard(0, 0, 1)).status is PublishStatus.PUBLISHED
    publisher.close(0.2)
    (tmp_path / "link").symlink_to(target)
    assert [name.rollout_id for name, _ in SpoolFolder(tmp_path).bundles()] == [0]


def test_a_bundle_above_the_quota_drops_the_rollout(tmp_path: Path) -> None:
    publisher = spool_publisher(tmp_path, max_spool_bytes=10)
    result = publisher.publish(0, whole_shard(0, 0, 1))
    assert result.status is PublishStatus.DROPPED
    assert result.reason is not None
    assert "max_spool_bytes 10" in result.reason
    publisher.close(0.2)


def test_a_recycled_file_shows_nothing_of_its_earlier_content(tmp_path: Path) -> None:
    session = spool_session(tmp_path)
    publisher = spool_publisher(tmp_path, strict=True)
    shards = [whole_shard(seed, 0, 1) for seed in range(4)]
    shards[1]["log_probs"] = [tensor.repeat_interleave(1) for tensor in shards[1]["log_probs"]]
    inodes = set()
    for rollout_id, shard in enumerate(shards):
        if rollout_id == 2:
            shard["extra"] = [torch.full((1000,), 7.0)] * 7
        publisher.publish(rollout_id, shard)
        while not session.spool.bundles():
            pass
        direct = build_dump_payload(
            [{"rank": 0, "data_parallel_rank": 0, "rollout_data": shard}], rollout_id=rollout_id, writer_rank=0
        )
        assert not differences(payload_in_spool(tmp_path, rollout_id), direct)
        ((_, path),) = session.spool.bundles()
        inodes.add((path / "tensors.safetensors").stat().st_ino)
        safetensors.torch.load_file(path / "tensors.safetensors")
        session.spool.retire(path)
    assert len(inodes) == 1
    publisher.close(0.2)


def test_what_no_rank_holds_reads_as_zero_in_a_recycled_file(tmp_path: Path) -> None:
    session = spool_session(tmp_path)
    layouts = [ParallelLayout(context_parallel_rank=rank, context_parallel_size=2) for rank in range(2)]
    plans = [
        make_plan(context_parallel_share(whole_shard(0, 0, 1), layout.context_parallel_rank, 2), layout)
        for layout in layouts
    ]
    used = session.start_bundle(BundleName(0, 1, "dp0"), plans[0])
    used.file.data.fill_(255)
    session.spool.pool.give(used.path / "tensors.safetensors")
    bundle = session.start_bundle(BundleName(1, 1, "dp0"), plans[0])
    for rank, plan in enumerate(plans):
        copy_own(plan, rank, bundle.file.data)
    finish_tensor_file(bundle.path / "tensors.safetensors", plans[0].records)
    whole = make_plan(whole_shard(0, 0, 1), ParallelLayout())
    expected = torch.zeros(whole.data_bytes, dtype=torch.uint8)
    copy_own(whole, 0, expected)
    assert torch.equal(bundle.file.data, expected)


def test_a_full_pool_takes_no_more(tmp_path: Path) -> None:
    pool = TensorPool(tmp_path / "pool", max_bytes=10)
    for number in range(3):
        file = tmp_path / f"file-{number}"
        file.write_bytes(bytes(4))
        pool.give(file)
    assert [size for size, _ in pool.files()] == [4, 4]
    pool.take(tmp_path / "taken", 3)
    assert (tmp_path / "taken").stat().st_size == 3
    assert len(pool.files()) == 1


def test_a_pool_keeps_few_files_however_small_they_are(tmp_path: Path) -> None:
    pool = TensorPool(tmp_path / "pool")
    for number in range(100):
        file = tmp_path / f"file-{number}"
        file.write_bytes(b"x")
        pool.give(file)
    assert len(pool.files()) == 64
