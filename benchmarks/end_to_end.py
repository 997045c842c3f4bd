"""From `publish` to the durable `.pt`, beside the broker's own tools on the same broker and beside the inline file.

Four ranks (CP 2, DP 2) publish a rollout of 1.5 GB, the shipper and the daemon are processes of their own, and
everything shares the machine's cores. One run measures all ways, one after the other. Run with `--on memory` to have
the broker's log and the dumps on tmpfs, which leaves the speed of the programs; on disk the file is durable.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed as dist
from folders import tmpfs
from kafka_tools import RECORD_BYTES, consumer_mb_per_s, producer_mb_per_s
from processes import CoreSeconds, shipper_of, wait_until
from records import demo_like
from results import write

from fixtures.ranks import Grid, run_ranks
from rollcast.consumer.broker import BrokerConfig, JvmBroker
from rollcast.producer import Publisher, PublisherConfig, all_gather_with_cp, save_debug_train_data
from rollcast.producer.parallel import current_layout

GOAL = 0.9
SAMPLES, PROMPT, RESPONSE, DISTINCT = 1536, 1024, 32_768, 32
ROUNDS, WARM_UP = 3, 1
RUN = "end-to-end"
_LEAST_RECORDS = 1000


def main() -> None:
    """Runs everything and prints the ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--on", choices=["disk", "memory"], default="disk", help="where broker and dumps write")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of the rollout; fewer for a short run")
    options = parser.parse_args()
    where = tmpfs() if options.on == "memory" else None
    with tempfile.TemporaryDirectory(dir=where) as folder, tempfile.TemporaryDirectory(dir=tmpfs()) as spool:
        broker = JvmBroker(BrokerConfig(data_dir=Path(folder) / "broker"))
        with broker:
            result = _measure(broker, Path(folder), Path(spool), options.samples)
    result["on"] = options.on
    _print(result)
    write(f"end-to-end-{options.on}", result)


def _measure(broker: JvmBroker, folder: Path, spool: Path, samples: int) -> dict[str, Any]:
    servers = broker.bootstrap_servers
    # As many bytes as the rollout has; with fewer, the tools would mostly warm up.
    records = max(_LEAST_RECORDS, samples * (40 * RESPONSE * 3 // 4 + 8 * PROMPT) // RECORD_BYTES)
    result: dict[str, Any] = {
        "disk_mb_per_s": _synced_write_mb_per_s(folder),
        "producer_tool_mb_per_s": producer_mb_per_s(servers, records),
        "consumer_tool_mb_per_s": consumer_mb_per_s(servers, records),
    }
    with _daemon(servers, folder) as daemon:
        if broker.pid is None:
            raise RuntimeError("the broker has ended")
        pids = {"broker": broker.pid, "daemon": daemon.pid}
        ranks = run_ranks(
            Grid(world=4, context=2), publish_and_wait, servers, folder, spool, samples, pids, timeout_s=1200
        )
    return (
        result
        | {key: max(rank[key] for rank in ranks) for key in ranks[0] if key != "cores"}
        | {"cores": ranks[0]["cores"]}
    )


def publish_and_wait(servers: str, folder: Path, spool: Path, samples: int, pids: dict[str, int]) -> dict[str, Any]:
    """Measures on one rank: the rollout by way of Kafka, then inline."""
    layout = current_layout()
    data = demo_like(samples, prompt_tokens=PROMPT, response_tokens=RESPONSE, distinct=DISTINCT, layout=layout)
    publisher = Publisher(PublisherConfig(run_id=RUN, spool_dir=spool, bootstrap_servers=servers, strict=True))
    raw_bytes, stall_s, seconds, cores = 0, [], [], []
    for rollout in range(WARM_UP + ROUNDS):
        dist.barrier()
        usage = CoreSeconds(_processes(pids, spool))
        started = time.perf_counter()
        published = publisher.publish(rollout, data)
        path = folder / RUN / f"{rollout}.pt"
        if layout.rank == 0:
            wait_until(path.exists, "the dump")
        dist.barrier()
        seconds.append(time.perf_counter() - started)
        cores.append(usage.spent())
        stall_s.append(published.stall_s)
        raw_bytes = published.raw_bytes
        if layout.rank == 0:
            path.unlink()
    publisher.close(60)
    middle = sorted(range(WARM_UP, WARM_UP + ROUNDS), key=lambda at: seconds[at])[ROUNDS // 2]
    return {
        "raw_mb": raw_bytes / 1e6 * layout.data_parallel_size,
        "published_s": seconds[middle],
        "stall_s": stall_s[middle],
        "cores": cores[middle],
        **_inline(data, folder),
    }


def _processes(pids: dict[str, int], spool: Path) -> dict[str, psutil.Process]:
    processes = {name: psutil.Process(pid) for name, pid in pids.items()}
    shipper = shipper_of(spool)
    return processes | ({"shipper": shipper} if shipper is not None else {})


def _inline(data: dict[str, Any], folder: Path) -> dict[str, float]:
    args = SimpleNamespace(save_debug_train_data=str(folder / "inline-{rollout_id}.pt"))
    dist.barrier()
    started = time.perf_counter()
    save_debug_train_data(args, rollout_id=0, rollout_data=data, gather_tensor=all_gather_with_cp)
    dist.barrier()
    ready = time.perf_counter() - started
    if dist.get_rank() == 0:
        with (folder / "inline-0.pt").open("rb") as file:
            os.fsync(file.fileno())
    dist.barrier()
    return {"inline_s": ready, "inline_durable_s": time.perf_counter() - started}


@contextmanager
def _daemon(servers: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-W", "ignore", "-m", "rollcast.consumer.cli", "consume", "--bootstrap", servers]
    command += ["--dump-path", f"{folder}/{{run_id}}/{{rollout_id}}.pt", "--max-resident-bytes", str(8 * 2**30)]
    log = folder / "daemon.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield process
    except BaseException:
        print(log.read_text()[-4000:], file=sys.stderr)
        raise
    finally:
        process.terminate()
        process.wait(60)


def _synced_write_mb_per_s(folder: Path) -> float:
    block, blocks = torch.ones(16 * 2**20, dtype=torch.uint8).numpy().data, 24
    started = time.perf_counter()
    with (folder / "written").open("wb") as file:
        for _ in range(blocks):
            file.write(block)
        os.fsync(file.fileno())
    took = time.perf_counter() - started
    (folder / "written").unlink()
    return len(block) * blocks / 1e6 / took


def _print(result: dict[str, Any]) -> None:
    ours = result["raw_mb"] / result["published_s"]
    tools = result["producer_tool_mb_per_s"], result["consumer_tool_mb_per_s"]
    result["mb_per_s"], result["of_lower_tool"] = ours, ours / min(tools)
    result["inline_over_published"] = result["inline_s"] / result["published_s"]
    print(
        f"{result['raw_mb']:.0f} MB raw on {result['on']}, publish to dump: {result['published_s']:.2f} s, "
        f"{ours:.0f} MB/s\n"
        f"  producer tool {tools[0]:.0f} MB/s, consumer tool {tools[1]:.0f} MB/s (acks=all, {RECORD_BYTES} bytes a "
        f"record); of the lower one: {result['of_lower_tool']:.2f} (goal: at least {GOAL})\n"
        f"  inline file ready after {result['inline_s']:.2f} s, durable after {result['inline_durable_s']:.2f} s: "
        f"{result['inline_over_published']:.2f} times as long as by way of Kafka (goal: above 1)\n"
        f"  stall {result['stall_s']:.3f} s; core seconds {result['cores']}; one synced file "
        f"{result['disk_mb_per_s']:.0f} MB/s"
    )


if __name__ == "__main__":
    sys.exit(main())
