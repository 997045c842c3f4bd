"""How a shard split over two context-parallel ranks is put together: collectives, seconds, extra memory.

One run compares three ways on the same data: one collective per field and sample (as frameworks do inline), messages in
byte buckets, and in place into the spool's file. Run it with `make bench`.
"""

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from folders import shared, tmpfs

from fixtures.ranks import Grid, run_ranks
from rollcast.producer import (
    Publisher,
    PublisherConfig,
    all_gather_with_cp,
    restore_context_parallel_fields_to_cpu,
)
from rollcast.producer.context_parallel import response_spans, span_tokens
from rollcast.producer.parallel import current_layout

SAMPLES, PROMPT, RESPONSE = 128, 1024, 16_384
FIELDS = ("rollout_log_probs", "log_probs", "ref_log_probs", "values", "advantages", "returns", "kl", "entropy")
ROUNDS = 5
_COLLECTIVES = ("all_gather", "all_gather_into_tensor", "all_reduce", "gather", "send", "recv", "broadcast")


def main() -> None:
    """Runs the comparison and prints it."""
    ranks = run_ranks(Grid(world=2, context=2), measure, timeout_s=500)
    table = {
        way: {
            "collectives": max(rank[way]["collectives"] for rank in ranks),
            "seconds": max(rank[way]["seconds"] for rank in ranks),
            "extra_mib": max(rank[way]["extra_mib"] for rank in ranks),
        }
        for way in ranks[0]
    }
    base = table["per tensor"]
    print(f"cp 2, {SAMPLES} samples, {len(FIELDS)} float32 fields, {RESPONSE} response tokens; median of {ROUNDS}")
    print(f"{'way':12} {'collectives':>12} {'of base':>9} {'seconds':>9} {'of base':>9} {'extra MiB':>10}")
    for way, row in table.items():
        print(
            f"{way:12} {row['collectives']:12.0f} {row['collectives'] / base['collectives']:9.2%} "
            f"{row['seconds']:9.3f} {row['seconds'] / base['seconds']:9.3f} {row['extra_mib']:10.1f}"
        )
    out = Path(__file__).parent / "results" / "restore.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(table, indent=2) + "\n")


def measure() -> dict[str, dict[str, float]]:
    """Measures every way on this rank."""
    data = _share()
    with tempfile.TemporaryDirectory(dir=tmpfs()) as folder:
        results = {"per tensor": _measured(lambda _: _per_tensor(data))}
        for way, restore in (("bucketed", "gather"), ("in place", "in_place")):
            publisher = Publisher(
                PublisherConfig(
                    run_id=restore,
                    spool_dir=shared(Path(folder) / restore),
                    bootstrap_servers="127.0.0.1:1",
                    start_shipper=False,
                    context_parallel_restore=restore,
                    strict=True,
                )
            )
            results[way] = _measured(lambda turn, publisher=publisher: publisher.publish(turn, data))
            publisher.close(0.1)
        dist.barrier()
    return results


def _share() -> dict[str, Any]:
    layout = current_layout()
    total = PROMPT + RESPONSE
    held = span_tokens(response_spans(total, RESPONSE, layout.context_parallel_rank, layout.context_parallel_size))
    generator = torch.Generator().manual_seed(layout.context_parallel_rank)
    return {
        "response_lengths": [RESPONSE] * SAMPLES,
        "total_lengths": [total] * SAMPLES,
        **{name: [torch.rand(held, generator=generator) for _ in range(SAMPLES)] for name in FIELDS},
    }


def _per_tensor(data: dict[str, Any]) -> None:
    restore_context_parallel_fields_to_cpu(
        data, all_gather_with_cp, keep_restored=current_layout().context_parallel_rank == 0
    )


def _measured(way: Callable[[int], Any]) -> dict[str, float]:
    seconds, extra = [], 0.0
    way(0)
    with _counted_collectives() as count:
        for turn in range(1, ROUNDS + 1):
            dist.barrier()
            with _peak_anonymous_memory() as peak:
                started = time.perf_counter()
                way(turn)
                seconds.append(time.perf_counter() - started)
            extra = max(extra, peak[0] / 2**20)
    return {"collectives": count[0] / ROUNDS, "seconds": sorted(seconds)[ROUNDS // 2], "extra_mib": extra}


@contextmanager
def _counted_collectives() -> Iterator[list[int]]:
    count, originals = [0], {name: getattr(dist, name) for name in _COLLECTIVES}

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            count[0] += 1
            return original(*arguments, **options)

        return call

    for name, original in originals.items():
        setattr(dist, name, counting(original))
    try:
        yield count
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


@contextmanager
def _peak_anonymous_memory() -> Iterator[list[int]]:
    before, peak, done = _anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], _anonymous_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon; this benchmark needs Linux")


if __name__ == "__main__":
    sys.exit(main())
