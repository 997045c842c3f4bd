"""How long training stands still for a rollout: `publish`, beside the inline dump and beside one copy of the bytes.

Real megatron-core groups over gloo; 128 samples a shard, 1k prompt, 16k response, 8 float32 fields. One run compares,
on the same data, (a) the inline way (one collective per field and sample, gather to one rank, `torch.save`), (b) one
memcpy of the shard's bytes on each writer, and `publish` into tmpfs and into the disk's folder. The shipper takes each
rollout to a real Kafka before the next one is published, as it does when rollouts are minutes apart; each memcpy comes
after a wait of the same length, for the first copy after one is slower than the tenth in a row.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from folders import shared, tmpfs
from processes import await_prepared

from fixtures.ranks import Grid, run_ranks
from rollcast.consumer.broker import running_broker
from rollcast.producer import Publisher, PublisherConfig, all_gather_with_cp, save_debug_train_data
from rollcast.producer.context_parallel import response_spans, span_tokens
from rollcast.producer.parallel import current_layout

SAMPLES, PROMPT, RESPONSE = 128, 1024, 16_384
FIELDS = ("rollout_log_probs", "log_probs", "ref_log_probs", "values", "advantages", "returns", "kl", "entropy")
ROUNDS, INLINE_ROUNDS, WARM_UP = 10, 3, 2


def main() -> None:
    """Runs both layouts and prints the ratios."""
    results = {}
    with running_broker() as broker:
        run(broker.bootstrap_servers, results)
    out = Path(__file__).parent / "results" / "stall.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(results, indent=2) + "\n")


def run(bootstrap_servers: str, results: dict[str, Any]) -> None:
    """Measures both layouts."""
    for name, grid in {"CP2 x DP2": Grid(world=4, context=2), "CP1 x DP2": Grid(world=2)}.items():
        ranks = run_ranks(grid, measure, bootstrap_servers, timeout_s=550)
        slowest = {way: max(rank[way] for rank in ranks) for way in ranks[0]}
        results[name] = slowest
        print(f"{name}: {SAMPLES} samples a shard, {ranks[0]['shard_mb']:.0f} MB; median of {ROUNDS}, slowest rank")
        for way in ("inline", "memcpy", "publish, tmpfs", "publish, disk"):
            inline, floor = slowest["inline"] / slowest[way], slowest[way] / slowest["memcpy"]
            print(f"  {way:16} {slowest[way]:8.3f} s   {inline:6.1f} x less than inline   {floor:5.2f} x one memcpy")


def measure(bootstrap_servers: str) -> dict[str, float]:
    """Measures every way on this rank."""
    layout = current_layout()
    data = _share()
    with tempfile.TemporaryDirectory(dir=tmpfs()) as fast, tempfile.TemporaryDirectory() as disk:
        fast_folder, disk_folder = shared(Path(fast)), shared(Path(disk))
        shard = torch.empty(SAMPLES * (len(FIELDS) * RESPONSE * 4 + (PROMPT + RESPONSE) * 8), dtype=torch.uint8)
        shard.fill_(1)
        target = torch.ones_like(shard)
        results = {"shard_mb": shard.numel() / 1e6}
        results["memcpy"] = _median(
            lambda _: target.copy_(shard) if layout.is_writer else None,
            ROUNDS,
            between=lambda: _await_prepared(fast_folder),
        )
        for way, folder in (("publish, tmpfs", fast_folder), ("publish, disk", disk_folder)):
            config = PublisherConfig(
                run_id="stall", spool_dir=folder, bootstrap_servers=bootstrap_servers, topic_prefix=way[9:], strict=True
            )
            publisher = Publisher(config)
            results[way] = _median(
                lambda turn, publisher=publisher: publisher.publish(turn, data),
                ROUNDS,
                between=lambda folder=folder: _await_prepared(folder),
            )
            publisher.close(60)
        args = SimpleNamespace(save_debug_train_data=str(disk_folder / "inline-{rollout_id}.pt"))
        results["inline"] = _median(
            lambda turn: save_debug_train_data(
                args, rollout_id=turn, rollout_data=data, gather_tensor=all_gather_with_cp
            ),
            INLINE_ROUNDS,
        )
        dist.barrier()
    return results


def _share() -> dict[str, Any]:
    layout = current_layout()
    total = PROMPT + RESPONSE
    held = span_tokens(response_spans(total, RESPONSE, layout.context_parallel_rank, layout.context_parallel_size))
    generator = torch.Generator().manual_seed(layout.rank)
    return {
        "tokens": [torch.randint(0, 150_000, (total,), generator=generator) for _ in range(SAMPLES)],
        "response_lengths": [RESPONSE] * SAMPLES,
        "total_lengths": [total] * SAMPLES,
        "partition": [slot * layout.data_parallel_size + layout.data_parallel_rank for slot in range(SAMPLES)],
        **{name: [torch.rand(held, generator=generator) for _ in range(SAMPLES)] for name in FIELDS},
    }


def _await_prepared(spool: Path) -> None:
    dist.barrier()
    await_prepared(spool)


def _median(way: Callable[[int], Any], rounds: int, between: Callable[[], None] = lambda: None) -> float:
    seconds = []
    for turn in range(rounds + WARM_UP):
        between()
        dist.barrier()
        started = time.perf_counter()
        way(turn)
        seconds.append(time.perf_counter() - started)
    return sorted(seconds[WARM_UP:])[rounds // 2]


if __name__ == "__main__":
    sys.exit(main())
