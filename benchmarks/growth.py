"""How the stall and the shipper's memory grow with the samples of a shard and with the number of shards.

Ranks that stand still for a copy share the machine's cores and the way to its memory; beside the seconds on the clock
stand the processor's seconds of the training thread, and how many times as long it takes as one memcpy of a shard's
bytes, which all ranks do at the same time too.
"""

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from folders import shared, tmpfs
from processes import anonymous_bytes, await_prepared, shipper_of
from records import demo_like
from results import write

from fixtures.ranks import Grid, run_ranks
from rollcast.consumer.broker import JvmBroker
from rollcast.producer import Publisher, PublisherConfig
from rollcast.producer.parallel import current_layout

SAMPLES, SHARDS = (16, 64, 256), (1, 2, 4)
_SAMPLES_WHERE_SHARDS_GROW = 64
PROMPT, RESPONSE, DISTINCT = 512, 16_384, 8
ROUNDS, WARM_UP = 5, 2


def main() -> None:
    """Runs every size and prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of which the median counts; fewer for a short run")
    rounds = parser.parse_args().rounds
    sizes = [*((samples, 1) for samples in SAMPLES), *((_SAMPLES_WHERE_SHARDS_GROW, shards) for shards in SHARDS[1:])]
    rows = []
    print("samples  shards  shard MB   stall ms   ms a MB  core ms a MB  of a memcpy  shipper peak MiB")
    with JvmBroker() as broker:
        for samples, shards in sizes:
            ranks = run_ranks(Grid(world=shards), measure, broker.bootstrap_servers, samples, rounds, timeout_s=400)
            row = {"samples": samples, "shards": shards} | {key: max(rank[key] for rank in ranks) for key in ranks[0]}
            rows.append(row)
            print(
                f"{samples:7} {shards:7} {row['shard_mb']:9.1f} {1e3 * row['stall_s']:10.1f} "
                f"{1e3 * row['stall_s'] / row['shard_mb']:9.2f} {1e3 * row['core_s'] / row['shard_mb']:13.2f} "
                f"{row['stall_s'] / row['memcpy_s']:12.2f} {row['shipper_peak_mib']:17.1f}",
                flush=True,
            )
    ratios = _ratios({(row["samples"], row["shards"]): row for row in rows})
    for what, ratio in ratios.items():
        print(f"{what}: {ratio:.2f}")
    write("growth", {"rows": rows, "ratios": ratios})


def _ratios(rows: dict[tuple[int, int], dict[str, float]]) -> dict[str, float]:
    small, large = rows[SAMPLES[0], 1], rows[SAMPLES[-1], 1]
    one, many = rows[_SAMPLES_WHERE_SHARDS_GROW, 1], rows[_SAMPLES_WHERE_SHARDS_GROW, SHARDS[-1]]
    longer, larger = large["stall_s"] / small["stall_s"], large["shard_mb"] / small["shard_mb"]
    return {
        f"stall a MB, {SAMPLES[-1]} samples over {SAMPLES[0]} (linear: 1)": longer / larger,
        f"core seconds of the stall, {SHARDS[-1]} shards over 1 (flat: 1)": many["core_s"] / one["core_s"],
        f"stall, {SHARDS[-1]} shards over 1, on the cores there are": many["stall_s"] / one["stall_s"],
        f"one memcpy, {SHARDS[-1]} shards over 1, on the cores there are": many["memcpy_s"] / one["memcpy_s"],
        f"shipper peak, {SAMPLES[-1]} samples over {SAMPLES[0]} (flat: 1)": large["shipper_peak_mib"]
        / small["shipper_peak_mib"],
        f"shipper peak, {SHARDS[-1]} shards over 1 (flat: 1)": many["shipper_peak_mib"] / one["shipper_peak_mib"],
    }


def measure(servers: str, samples: int, rounds: int) -> dict[str, float]:
    """Publishes on one rank, each rollout when the one before has left the spool."""
    layout = current_layout()
    everywhere = samples * layout.data_parallel_size
    data = demo_like(everywhere, prompt_tokens=PROMPT, response_tokens=RESPONSE, distinct=DISTINCT, layout=layout)
    with tempfile.TemporaryDirectory(dir=tmpfs()) as folder:
        spool = shared(Path(folder))
        publisher = Publisher(
            PublisherConfig(
                run_id=f"growth-{samples}-{layout.data_parallel_size}",
                spool_dir=spool,
                bootstrap_servers=servers,
                strict=True,
            )
        )
        taken: list[tuple[float, float]] = []
        with _peak_of_shipper(spool) as peak:
            for rollout in range(WARM_UP + rounds):
                dist.barrier()
                wall, core = time.perf_counter(), time.thread_time()
                result: Any = publisher.publish(rollout, data)
                taken.append((time.perf_counter() - wall, time.thread_time() - core))
                dist.barrier()
                await_prepared(spool)
        publisher.close(30)
        dist.barrier()
    stall, core = (sorted(column[WARM_UP:])[rounds // 2] for column in zip(*taken, strict=True))
    return {
        "memcpy_s": _memcpy_s(result.raw_bytes, rounds),
        "shard_mb": result.raw_bytes / 1e6,
        "stall_s": stall,
        "core_s": core,
        "shipper_peak_mib": peak[0] / 2**20,
    }


def _memcpy_s(size: int, rounds: int) -> float:
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    taken = []
    for _ in range(WARM_UP + rounds):
        dist.barrier()
        started = time.perf_counter()
        target.copy_(source)
        taken.append(time.perf_counter() - started)
    return sorted(taken[WARM_UP:])[rounds // 2]


@contextmanager
def _peak_of_shipper(spool: Path) -> Iterator[list[int]]:
    """Watches from the first rank alone: others would only take its core."""
    peak, done = [0], threading.Event()

    def watch() -> None:
        process = None
        while not done.wait(0.02):
            process = process or shipper_of(spool)
            try:
                peak[0] = max(peak[0], anonymous_bytes(process.pid) if process is not None else 0)
            except ProcessLookupError:
                # Each writer starts one; all but the first find the spool taken, and end.
                process = None

    watcher = threading.Thread(target=watch)
    if dist.get_rank() == 0:
        watcher.start()
    try:
        yield peak
    finally:
        done.set()
        if watcher.ident is not None:
            watcher.join()


if __name__ == "__main__":
    sys.exit(main())
