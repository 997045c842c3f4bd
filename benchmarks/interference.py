"""How much longer a training step takes while the shipper is busy beside it.

The trainer has one core, the shipper and the broker have another. Windows with a rollout in the spool and windows
without take turns, so that whatever else the machine does meets both alike. Beside the seconds on the clock stand those
of the core, in which another program on the trainer's core does not count. `publish` itself is not in the steps: what
it costs is the stall benchmark's question.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from folders import tmpfs
from processes import is_empty, pin, shipper_of, wait_until
from records import demo_like
from results import write

from rollcast.consumer.broker import JvmBroker
from rollcast.producer import Publisher, PublisherConfig

GOAL = 1.05
SAMPLES, PROMPT, RESPONSE = 256, 1024, 16_384
WINDOWS = 10
_IDLE_STEPS = 150
_MATRIX = 384


def main() -> None:
    """Measures and prints the ratio."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--windows", type=int, default=WINDOWS, help="of each kind; fewer for a short run")
    windows = parser.parse_args().windows
    torch.set_num_threads(1)
    first, second = sorted(os.sched_getaffinity(0))[:2]
    with tempfile.TemporaryDirectory(dir=tmpfs()) as folder, JvmBroker() as broker:
        if broker.pid is None:
            raise RuntimeError("the broker has ended")
        pin(broker.pid, second)
        pin(os.getpid(), first)
        steps = _measure(Path(folder), broker.bootstrap_servers, windows, shipper_core=second)
    result: dict[str, Any] = {
        "pinned": {"trainer": first, "shipper": second, "broker": second},
        "steps": {kind: len(taken) for kind, taken in steps.items()},
        "step_s": _medians(steps, 0),
        "core_s": _medians(steps, 1),
    }
    result["ratio"] = result["step_s"]["busy"] / result["step_s"]["idle"]
    result["core_ratio"] = result["core_s"]["busy"] / result["core_s"]["idle"]
    print(
        f"trainer on core {first}, shipper and broker on core {second}; {windows} windows of each kind, "
        f"{result['steps']['idle']} steps idle, {result['steps']['busy']} with the shipper busy\n"
        f"median step {1e3 * result['step_s']['idle']:.2f} ms idle, {1e3 * result['step_s']['busy']:.2f} ms busy: "
        f"{result['ratio']:.3f} times as long (goal: at most {GOAL}); of the core's time {result['core_ratio']:.3f}"
    )
    write("interference", result)


def _medians(steps: dict[str, list[tuple[float, float]]], clock: int) -> dict[str, float]:
    return {kind: statistics.median(each[clock] for each in taken) for kind, taken in steps.items()}


def _measure(spool: Path, servers: str, windows: int, shipper_core: int) -> dict[str, list[tuple[float, float]]]:
    data = demo_like(SAMPLES, prompt_tokens=PROMPT, response_tokens=RESPONSE, distinct=16)
    publisher = Publisher(PublisherConfig(run_id="steps", spool_dir=spool, bootstrap_servers=servers, strict=True))
    step = _training_step()
    publisher.publish(0, data)
    wait_until(lambda: shipper_of(spool) is not None, "a shipper")
    shipper = shipper_of(spool)
    if shipper is None:
        raise RuntimeError("the shipper has ended")
    pin(shipper.pid, shipper_core)
    wait_until(lambda: is_empty(spool), "an empty spool")
    steps: dict[str, list[tuple[float, float]]] = {"idle": [], "busy": []}
    for window in range(windows):
        for _ in range(_IDLE_STEPS):
            is_empty(spool)
            steps["idle"].append(_timed(step))
        publisher.publish(window + 1, data)
        while not is_empty(spool):
            steps["busy"].append(_timed(step))
    publisher.close(30)
    return steps


def _training_step() -> Callable[[], None]:
    weights = torch.rand(_MATRIX, _MATRIX, requires_grad=True)
    inputs = torch.rand(_MATRIX, _MATRIX)

    def step() -> None:
        loss = (inputs @ weights).tanh().sum()
        torch.autograd.backward([loss])
        with torch.no_grad():
            weights.grad = None

    return step


def _timed(step: Callable[[], None]) -> tuple[float, float]:
    wall, core = time.perf_counter(), time.thread_time()
    step()
    return time.perf_counter() - wall, time.thread_time() - core


if __name__ == "__main__":
    sys.exit(main())
