"""Bytes on the wire over the size of the inline `.pt`, on the demo's own records and on demo-like ones of real length.

Also what each column costs, beside other ways to encode the same bytes, and how fast one core encodes and decodes.
"""

import io
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import zstandard
from records import demo_like
from results import write

from fixtures.frames import ShardSource, frames_of
from rollcast.schemas import SamplePart, TensorSlice, build_dump_payload, decode
from rollcast.schemas.joining import join
from rollcast.schemas.parts import content_digest, pack_large_values, split
from rollcast.schemas.tensors import columns_of
from rollcast.schemas.topics import record_key
from rollcast_demo.learner import Learner
from rollcast_demo.records import Place, build_records
from rollcast_demo.rollout import RolloutEngine

GOAL = 0.40
SAMPLES, PROMPT, RESPONSE = 16, 1024, 16_384
_ROUNDS = 5
# Of one uncompressed Kafka record alone in its batch: the batch's header, and the record's, at most.
_KAFKA_OVERHEAD_BYTES = 61 + 20


def main() -> None:
    """Measures, prints and writes the table."""
    torch.set_num_threads(1)
    long = demo_like(SAMPLES, prompt_tokens=PROMPT, response_tokens=RESPONSE)
    result = {
        "demo": _whole(_demo_rollout()),
        "demo_like": _whole(long),
        "columns": {name: _column(name, long) for name in _tensor_columns(long)},
        "speed_mb_per_s": _speed(long),
    }
    for name in ("demo", "demo_like"):
        row = result[name]
        print(
            f"{name}: {row['wire_bytes'] / 1e6:.3f} MB on the wire over {row['inline_bytes'] / 1e6:.3f} MB inline: "
            f"{row['ratio']:.3f} (goal: at most {GOAL})"
        )
    ways = list(next(iter(result["columns"].values()))["ratios"])
    print(f"{'column':18} {'MB':>6} " + " ".join(f"{way:>15}" for way in ways))
    for name, row in result["columns"].items():
        print(f"{name:18} {row['mb']:6.2f} " + " ".join(f"{row['ratios'][way]:15.3f}" for way in ways))
    total = sum(row["mb"] for row in result["columns"].values())
    sums = {way: sum(row["mb"] * row["ratios"][way] for row in result["columns"].values()) / total for way in ways}
    print(f"{'all':18} {total:6.2f} " + " ".join(f"{sums[way]:15.3f}" for way in ways))
    print("one core, MB/s of raw bytes: " + ", ".join(f"{k} {v:.0f}" for k, v in result["speed_mb_per_s"].items()))
    write("size", result)


def _demo_rollout() -> dict[str, Any]:
    learner = Learner(seed=1, learning_rate=1e-3)
    learner.warm_up(150)
    samples = RolloutEngine(seed=1).generate(learner.model)
    place = Place(data_rank=0, data_size=1, context_rank=0, context_size=1, first_sample=0, first_rollout=0)
    return build_records(samples, learner.score(samples), place).rollout_data


def _whole(rollout_data: Mapping[str, Any]) -> dict[str, float]:
    source = ShardSource(rank=0, data_parallel_rank=0, rollout_data=rollout_data)
    frames = frames_of("math-7b", 1_700_000_000_000, 7, [source])
    key_bytes = len(record_key("math-7b", 7))
    wire = sum(len(frame) + key_bytes + _KAFKA_OVERHEAD_BYTES for frame in frames)
    shard = {"rank": 0, "data_parallel_rank": 0, "rollout_data": dict(rollout_data)}
    file = io.BytesIO()
    torch.save(build_dump_payload([shard], rollout_id=7, writer_rank=0), file)
    inline = file.tell()
    return {"wire_bytes": wire, "inline_bytes": inline, "records": len(frames), "ratio": wire / inline}


def _tensor_columns(rollout_data: Mapping[str, Any]) -> list[str]:
    return [name for name, value in rollout_data.items() if isinstance(value[0], torch.Tensor)]


def _column(name: str, rollout_data: Mapping[str, Any]) -> dict[str, Any]:
    tensors = rollout_data[name]
    raw_bytes = sum(tensor.nbytes for tensor in tensors)
    ratios = {way: sum(map(encode, tensors)) / raw_bytes for way, encode in _WAYS.items()}
    sent = [
        column.value
        for slot, _ in enumerate(tensors)
        for part in _parts(rollout_data, slot)
        for column in part.columns
        if column.name == name and isinstance(column.value, TensorSlice)
    ]
    ratios["as sent"] = sum(len(piece.data) for piece in sent) / raw_bytes
    return {"mb": raw_bytes / 1e6, "codecs": sorted({piece.codec for piece in sent}), "ratios": ratios}


def _parts(rollout_data: Mapping[str, Any], slot: int) -> list[SamplePart]:
    values = {name: rollout_data[name][slot] for name in _tensor_columns(rollout_data)}
    return split(_part_of(slot), pack_large_values(columns_of(values.items())))


def _part_of(slot: int) -> SamplePart:
    return SamplePart(
        run_id="math-7b",
        attempt=1,
        rollout_id=7,
        data_parallel_rank=0,
        slot=slot,
        rollout_position=slot,
        sample_index=slot,
        part=0,
        part_count=1,
        columns=(),
    )


def _zstd(level: int, arrange: Callable[[torch.Tensor], list[bytes]]) -> Callable[[torch.Tensor], int]:
    compressor = zstandard.ZstdCompressor(level=level)
    return lambda tensor: sum(min(len(piece), len(compressor.compress(piece))) for piece in arrange(tensor))


def _plain(tensor: torch.Tensor) -> list[bytes]:
    return [tensor.numpy().tobytes()]


def _planes(tensor: torch.Tensor) -> list[bytes]:
    return [plane.tobytes() for plane in tensor.numpy().view(np.uint8).reshape(-1, tensor.itemsize).T]


def _shuffled(tensor: torch.Tensor) -> list[bytes]:
    return [b"".join(_planes(tensor))]


_WAYS = {
    "zstd-1": _zstd(1, _plain),
    "zstd-3": _zstd(3, _plain),
    "shuffle, zstd-1": _zstd(1, _shuffled),
    "shuffle, zstd-3": _zstd(3, _shuffled),
    "planes, zstd-1": _zstd(1, _planes),
    "planes, zstd-3": _zstd(3, _planes),
}


def _speed(rollout_data: Mapping[str, Any]) -> dict[str, float]:
    names = _tensor_columns(rollout_data)
    raw_bytes = sum(tensor.nbytes for name in names for tensor in rollout_data[name])
    slots = [
        pack_large_values(columns_of((name, rollout_data[name][slot]) for name in names)) for slot in range(SAMPLES)
    ]
    parts = [split(_part_of(slot), columns) for slot, columns in enumerate(slots)]
    source = ShardSource(rank=0, data_parallel_rank=0, rollout_data=rollout_data)
    frames = frames_of("math-7b", 1, 7, [source])
    seconds = {
        "compress": _median(lambda: [split(_part_of(slot), columns) for slot, columns in enumerate(slots)]),
        "decompress": _median(lambda: [join(each) for each in parts]),
        "digest": _median(lambda: [content_digest(columns) for columns in slots]),
        "decode the frames": _median(lambda: [decode(frame) for frame in frames]),
    }
    return {what: raw_bytes / 1e6 / took for what, took in seconds.items()}


def _median(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return sorted(seconds)[_ROUNDS // 2]


if __name__ == "__main__":
    sys.exit(main())
