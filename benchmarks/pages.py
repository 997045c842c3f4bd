"""What the first touch of a page costs: one shard's bytes into a new file, a recycled one and a spare one.

One process, one run, the same bytes; beside it one memcpy into memory that is there. Run it with `make bench`.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from folders import tmpfs

from rollcast.producer.spool.pool import TensorPool
from rollcast.producer.spool.tensor_file import TensorFiles

SHARD_BYTES = 85 * 1024**2
ROUNDS = 9
_HEAD_BYTES = 64


def main() -> None:
    """Measures all ways and prints the ratios."""
    shard, target = torch.ones(SHARD_BYTES, dtype=torch.uint8), torch.ones(SHARD_BYTES, dtype=torch.uint8)
    seconds = {"memcpy": _median(lambda: None, lambda: target.copy_(shard))}
    for name, parent in (("tmpfs", tmpfs()), ("disk", None)):
        for way in (_new, _recycled, _spare):
            with tempfile.TemporaryDirectory(dir=parent) as folder:
                seconds[f"{way.__name__.strip('_')}, {name}"] = way(Path(folder), shard)
    print(f"one shard of {SHARD_BYTES / 1e6:.0f} MB, median of {ROUNDS}")
    for way, median in seconds.items():
        print(f"  {way:16} {median:7.3f} s   {median / seconds['memcpy']:6.1f} x one memcpy")
    out = Path(__file__).parent / "results" / "pages.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(seconds, indent=2) + "\n")


def _new(folder: Path, shard: torch.Tensor) -> float:
    bundle = folder / "bundle"
    return _median(lambda: bundle.unlink(missing_ok=True), lambda: _fill(TensorFiles(_pool(folder)), bundle, shard))


def _recycled(folder: Path, shard: torch.Tensor) -> float:
    files, bundle = TensorFiles(_pool(folder)), folder / "bundle"
    _fill(files, bundle, shard)
    return _median(lambda: _pool(folder).give(bundle), lambda: _fill(files, bundle, shard))


def _spare(folder: Path, shard: torch.Tensor) -> float:
    files, bundle = TensorFiles(_pool(folder)), folder / "bundle"

    def prepare() -> None:
        bundle.unlink(missing_ok=True)
        _pool(folder).keep_spares(1, _HEAD_BYTES + SHARD_BYTES)
        files.prefault()

    return _median(prepare, lambda: _fill(files, bundle, shard))


def _pool(folder: Path) -> TensorPool:
    return TensorPool(folder / "pool")


def _fill(files: TensorFiles, bundle: Path, shard: torch.Tensor) -> None:
    file = files.open(bundle, _HEAD_BYTES, SHARD_BYTES)
    file.data.copy_(shard)
    file.close()


def _median(prepare: Callable[[], object], way: Callable[[], object]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        prepare()
        started = time.perf_counter()
        way()
        seconds.append(time.perf_counter() - started)
    return sorted(seconds)[ROUNDS // 2]


if __name__ == "__main__":
    sys.exit(main())
