"""What the processes of a pipeline do: who they are, what they spend, where they run."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from rollcast.producer.spool.folder import SpoolFolder


def shipper_of(spool: Path) -> psutil.Process | None:
    """Returns the shipper that empties a spool, once there is one."""
    for process in psutil.process_iter(["cmdline"]):
        if f"--spool={spool}" in (process.info["cmdline"] or []):
            return process
    return None


def anonymous_bytes(pid: int) -> int:
    """Returns the memory that is a process's own: no mapped file counts, whoever has touched it.

    Raises:
        ProcessLookupError: the process has ended.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        lines = []
    for line in lines:
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} has ended")


def pin(pid: int, core: int) -> None:
    """Lets a process, all threads it has and all it will start, run on one core alone."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


def is_empty(spool: Path) -> bool:
    """Returns whether neither a bundle nor an unfinished one is left in a spool."""
    return not SpoolFolder(spool).bundles() and not any(spool.glob("*/.*-a*"))


def wait_until(true: Callable[[], bool], what: str, timeout_s: float = 240.0) -> None:
    """Returns when `true` says so.

    Raises:
        TimeoutError: it did not in time.
    """
    deadline = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {timeout_s:.0f} s")
        time.sleep(0.005)


def await_prepared(spool: Path) -> None:
    """Returns when a spool is empty and its writers are ready for the next rollout, as they are between real ones.

    Raises:
        TimeoutError: it did not become empty in time.
    """
    wait_until(lambda: is_empty(spool), "an empty spool")
    # Until the background threads have mapped what came back to the pool.
    time.sleep(1.2)


class CoreSeconds:
    """What processes spend from now on."""

    def __init__(self, processes: dict[str, psutil.Process]) -> None:
        self._processes = processes
        self._before = self._now()

    def spent(self) -> dict[str, float]:
        """Returns the seconds of each, user and system together."""
        now = self._now()
        return {name: round(now[name] - before, 2) for name, before in self._before.items()}

    def _now(self) -> dict[str, float]:
        times = {name: process.cpu_times() for name, process in self._processes.items()}
        return {name: each.user + each.system for name, each in times.items()}
