"""The examples of the README: four ranks under torchrun publish one rollout; a consumer reads the topic."""

import asyncio
import os
import random
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aiokafka import AIOKafkaProducer

from fixtures.frames import ShardSource, frames_of
from fixtures.installation import installation, shards
from fixtures.waiting import wait_until
from rollcast.consumer import differences
from rollcast.consumer.broker import BOOTSTRAP_VARIABLE, JvmBroker
from rollcast.consumer.dump_file import load_dump
from rollcast.consumer.topics import prepare_topics
from rollcast.schemas import Topics, build_dump_payload, record_key
from rollcast.schemas.parts import MIN_PART_BYTES
from rollcast_demo.daemon import running_daemon

pytestmark = pytest.mark.timeout(300)

_ROOT = Path(__file__).parents[2]
_READER = [sys.executable, str(_ROOT / "docs" / "examples" / "read_samples.py")]


def _command_of_the_readme() -> list[str]:
    """Returns its torchrun line, for this interpreter and any working directory."""
    (line,) = [line for line in (_ROOT / "README.md").read_text().splitlines() if line.startswith("torchrun ")]
    _, *options, script = shlex.split(line, comments=True)
    return [sys.executable, "-m", "torch.distributed.run", *options, str(_ROOT / script)]


def _whole_shard(number: int) -> dict[str, Any]:
    """What both context-parallel ranks of a shard hold together."""
    generator = torch.Generator().manual_seed(number)
    log_probs = [-torch.rand(length, generator=generator) for length in (9, 14)]
    return {
        "tokens": [torch.randint(50_000, (length,), generator=generator) for length in (15, 20)],
        "total_lengths": [15, 20],
        "response_lengths": [9, 14],
        "rewards": [1.0, 0.0],
        "log_probs": log_probs,
        "rollout_log_probs": [tensor.bfloat16().float() for tensor in log_probs],
        "partition": [number, number + 2],
    }


def test_four_ranks_under_torchrun_become_one_dump_of_what_they_held(own_broker: JvmBroker, tmp_path: Path) -> None:
    dump = tmp_path / "dumps" / "four-ranks" / "0.pt"
    with running_daemon(
        bootstrap_servers=own_broker.bootstrap_servers,
        topic_prefix="rollcast",
        dump_template=str(tmp_path / "dumps" / "{run_id}" / "{rollout_id}.pt"),
        log_path=tmp_path / "daemon.log",
    ):
        done = subprocess.run(
            _command_of_the_readme(),
            cwd=tmp_path,
            env={**os.environ, BOOTSTRAP_VARIABLE: own_broker.bootstrap_servers, "GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == [
            "rank 0: published, in Kafka: True",
            "rank 1: published",
            "rank 2: published, in Kafka: True",
            "rank 3: published",
        ]
        wait_until(dump.exists)
    shards = [{"rank": 2 * it, "data_parallel_rank": it, "rollout_data": _whole_shard(it)} for it in range(2)]
    assert not differences(load_dump(dump), build_dump_payload(shards, rollout_id=0, writer_rank=0))


def test_a_reader_whose_kafka_does_not_answer_ends_with_a_line_that_names_it() -> None:
    environment = {**os.environ, BOOTSTRAP_VARIABLE: "127.0.0.1:1"}
    done = subprocess.run(_READER, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "no Kafka answers at 127.0.0.1:1\n")


def _lines_of_the_reader(bootstrap_servers: str, count: int) -> list[str]:
    environment = {**os.environ, BOOTSTRAP_VARIABLE: bootstrap_servers}
    with subprocess.Popen(_READER, env=environment, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        try:
            return [reader.stdout.readline().rstrip() for _ in range(count)]
        finally:
            reader.terminate()


def _expected_lines(source: ShardSource) -> list[str]:
    data, where = source.rollout_data, f"run attempt 3 rollout 7 shard {source.data_parallel_rank}"
    own = f"partition {data['partition']!r}, raw_reward [1.0, 2.0]"
    lines = [f"{where} of 2: closed, sample_count 3", f"{where} shard's own: {own}"]
    for slot, position in enumerate(data["partition"]):
        length = data["response_lengths"][slot]
        lines.append(
            f"{where} sample {slot} (position {position}): extra {data['extra'][slot]!r}, log_probs [{length}], "
            f"loss_masks [{length}], response_lengths {length}, rewards {float(slot)}, rollout_log_probs [{length}], "
            f"tokens [{length + 5}]"
        )
    return lines


async def test_a_consumer_of_its_own_groups_parts_into_samples_whatever_else_is_on_the_topic(
    own_broker: JvmBroker,
) -> None:
    sources = shards(0, tokens=20_000)
    frames = frames_of("run", 3, 7, sources, max_part_bytes=MIN_PART_BYTES)
    expected = [line for source in sources for line in _expected_lines(source)]
    assert len(frames) > 2 * len(expected), "samples are cut into parts"
    values: list[bytes | None] = [frames[0], *frames]
    random.Random(0).shuffle(values)  # noqa: S311 - the same order in each run
    values[3:3] = [b"a stranger's", None]
    installed = installation(own_broker.bootstrap_servers, Path())
    await prepare_topics(replace(installed.config, topics=Topics()))
    async with AIOKafkaProducer(bootstrap_servers=own_broker.bootstrap_servers) as producer:
        for value in values:
            await producer.send("rollcast.records", value, key=record_key("run", 7))

    lines = await asyncio.to_thread(_lines_of_the_reader, own_broker.bootstrap_servers, len(expected) + 2)
    refused = [line for line in lines if " is not used: " in line]
    assert len(refused) == 2
    assert all(line.startswith("rollcast.records[") for line in refused)
    assert sorted(line for line in lines if line not in refused) == sorted(expected)
