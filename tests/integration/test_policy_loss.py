"""Policy-loss calls from a rank to their files."""

import asyncio
import math
import uuid
from pathlib import Path

import pytest
import torch

from fixtures.topic import read_until
from rollcast.consumer import ConsumeConfig, Daemon
from rollcast.consumer.broker import Broker
from rollcast.consumer.store.manifest import manifest_path
from rollcast.consumer.store.reading import parse_manifest
from rollcast.producer import Publisher, PublisherConfig, PublishStatus, publish_policy_loss_call
from rollcast.schemas import Topics


def _call(publisher: Publisher, seed: int, pg_loss: float = 0.5) -> dict[str, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    names = ("train_log_probs", "old_log_probs", "rollout_log_probs", "advantages")
    tensors = {name: [torch.randn(tokens, generator=generator) for tokens in (3, 0, 5)] for name in names}
    tensors["train_log_probs"] = [tensor.requires_grad_() for tensor in tensors["train_log_probs"]]
    masks = [torch.ones(tokens) for tokens in (3, 0, 5)]
    result = publish_policy_loss_call(
        publisher, **tensors, loss_masks=masks, ppo_kl=torch.tensor(0.25), pg_loss=torch.tensor(pg_loss)
    )
    assert result.status is PublishStatus.PUBLISHED
    return tensors


async def test_each_call_becomes_a_file_beside_the_dumps(broker: Broker, tmp_path: Path) -> None:
    prefix = f"test-{uuid.uuid4().hex[:12]}"
    publisher = Publisher(
        PublisherConfig(
            run_id="run",
            spool_dir=tmp_path / "spool",
            bootstrap_servers=broker.bootstrap_servers,
            topic_prefix=prefix,
            strict=True,
        )
    )
    calls = [_call(publisher, 0), _call(publisher, 1, pg_loss=math.nan)]
    publisher.publish(0, {"response_lengths": [1], "partition": [0]})
    assert await asyncio.to_thread(publisher.close, 60)
    config = ConsumeConfig(
        bootstrap_servers=broker.bootstrap_servers,
        dump_path=str(tmp_path / "dumps" / "{run_id}" / "{rollout_id}.pt"),
        topics=Topics(prefix),
        group_id=prefix,
    )
    daemon = Daemon(config)
    folder = tmp_path / "dumps" / "run"
    files = [folder / "policy_loss_debug" / f"rank_0_call_{call}.pt" for call in range(2)]
    running = asyncio.create_task(daemon.run())
    topic = f"{prefix}.dumps"
    await read_until(broker.bootstrap_servers, topic, lambda announced: len(announced) == 3)
    daemon.shutdown()
    await running
    assert (folder / "0.pt").exists()
    for number, (path, tensors) in enumerate(zip(files, calls, strict=True)):
        payload = torch.load(path, weights_only=True)
        assert (payload["rank"], payload["call"], payload["ppo_kl"]) == (0, number, 0.25)
        assert (payload["ppo_kl_is_finite"], payload["pg_loss_is_finite"]) == (True, number == 0)
        for slot, sample in enumerate(payload["samples"]):
            for name, expected in tensors.items():
                assert torch.equal(sample[name], expected[slot].detach())
            difference = (sample["train_log_probs"] - sample["rollout_log_probs"]).abs()
            assert torch.equal(sample["log_prob_abs_diff"], difference)
            assert sample["local_loss_masks"].dtype == torch.float32
        manifest = parse_manifest(manifest_path(path))
        assert manifest is not None
        assert manifest.id.stream == "policy-loss/0"


def test_a_call_that_is_misaligned_is_dropped_alone(tmp_path: Path) -> None:
    publisher = Publisher(
        PublisherConfig(run_id="run", spool_dir=tmp_path, bootstrap_servers="x:1", start_shipper=False)
    )
    short = [torch.zeros(1)]
    result = publish_policy_loss_call(
        publisher,
        train_log_probs=[torch.zeros(2)],
        old_log_probs=short,
        rollout_log_probs=None,
        advantages=short,
        loss_masks=short,
        ppo_kl=torch.tensor(0.0),
        pg_loss=torch.tensor(0.0),
    )
    assert result.status is PublishStatus.DROPPED
    assert result.reason is not None
    assert "advantages" in result.reason
    assert publisher.publish(0, {"response_lengths": []}).status is PublishStatus.PUBLISHED
    publisher.close(0.1)


@pytest.mark.parametrize("stream", ["", "policy-loss/", "policy-loss/-1", "policy-loss/1/../x", "other"])
def test_a_record_of_an_unknown_stream_is_refused(stream: str) -> None:
    from rollcast.consumer.errors import InvalidRecordError
    from rollcast.consumer.validity import check_event
    from rollcast.schemas import DEFAULT_LIMITS, SamplePart

    part = SamplePart(
        run_id="run",
        attempt=1,
        stream=stream,
        rollout_id=0,
        data_parallel_rank=0,
        slot=0,
        rollout_position=None,
        sample_index=None,
        part=0,
        part_count=1,
        columns=(),
    )
    with pytest.raises(InvalidRecordError, match="stream"):
        check_event(part, DEFAULT_LIMITS)
