"""The example of the README: four ranks under torchrun publish one rollout, and its dump holds what they held."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.waiting import wait_until
from rollcast.consumer import differences
from rollcast.consumer.broker import BOOTSTRAP_VARIABLE, JvmBroker
from rollcast.consumer.dump_file import load_dump
from rollcast.schemas import build_dump_payload
from rollcast_demo.daemon import running_daemon

pytestmark = pytest.mark.timeout(300)

_ROOT = Path(__file__).parents[2]


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
