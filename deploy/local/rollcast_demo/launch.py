"""Starts the eight ranks, follows them, and never leaves one behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import psutil

from rollcast_demo.config import Event, TrainerConfig
from rollcast_demo.errors import DeadlineExceededError, ProcessFailedError
from rollcast_demo.layout import WORLD_SIZE
from rollcast_demo.signals import signals_held

_STOP_GRACE_S = 5.0
_WATCH_EVERY_S = 1.0


@dataclass(kw_only=True, slots=True)
class RunReport:
    """What one training run reported.

    Attributes:
        run_id: The run.
        ready_s: Seconds from the start of the processes until the run's groups were up.
        finished_s: Seconds from the start of the processes until its publisher was closed.
        rollouts: Numbers of each rollout, the largest over ranks.
        problems: What a rank could not publish or deliver, one sentence each.
    """

    run_id: str
    ready_s: float = 0.0
    finished_s: float = 0.0
    rollouts: dict[int, dict[str, float]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rank:
    """One rank's process, and the end of the pipe on which its events come."""

    number: int
    process: ForkServerProcess
    events: Connection
    log_path: Path


def run_trainers(
    config: TrainerConfig,
    *,
    on_event: Callable[[Event], None] = lambda _event: None,
    watch: Callable[[], None] = lambda: None,
) -> list[RunReport]:
    """Train on eight processes and return one report for each layout, in order.

    The caller's main module is imported again in each of them, so it needs the usual `if __name__ == "__main__"`.

    Args:
        config: What to train and where to write.
        on_event: Called with each event, in this process; an exception from it stops the ranks.
        watch: Called about once a second, in the same way.

    Raises:
        ProcessFailedError: A rank failed; the others have been stopped.
        DeadlineExceededError: The training took more than `config.timeout_s`; all ranks have been stopped.
    """
    start = time.monotonic()
    reports = {config.run_id(layout): RunReport(run_id=config.run_id(layout)) for layout in config.layouts}
    with _running_ranks(config) as ranks:
        running = {rank.events: rank for rank in ranks}
        while running:
            ready = wait(list(running), timeout=_WATCH_EVERY_S)
            watch()
            if time.monotonic() > start + config.timeout_s:
                raise DeadlineExceededError(
                    what="the training",
                    timeout_s=config.timeout_s,
                    remedy=f"look at the logs in {config.log_dir}",
                )
            for events in ready:
                assert isinstance(events, Connection)
                event = _next_event(events)
                if event is None:
                    _check_exit(running.pop(events))
                else:
                    _note(reports[event.run_id], event, time.monotonic() - start)
                    on_event(event)
    return list(reports.values())


def _next_event(events: Connection) -> Event | None:
    """Return the event that is waiting, or None when the rank has closed its end."""
    try:
        event: Event = events.recv()
    except (EOFError, ConnectionResetError):
        return None
    return event


def _check_exit(rank: _Rank) -> None:
    """Raise when a rank that closed its pipe did not end well."""
    rank.process.join(_STOP_GRACE_S)
    if rank.process.exitcode != 0:
        raise ProcessFailedError(name=f"rank {rank.number}", exit_status=rank.process.exitcode, log_path=rank.log_path)


def _note(report: RunReport, event: Event, elapsed_s: float) -> None:
    """Add an event to the report."""
    if event.kind == "ready":
        report.ready_s = elapsed_s
    elif event.kind == "rollout":
        numbers = report.rollouts.setdefault(event.rollout_id, {})
        for name, value in event.numbers.items():
            numbers[name] = max(value, numbers.get(name, value))
    else:
        report.finished_s = elapsed_s
    if event.problem is not None:
        where = f"rank {event.rank}" if event.rollout_id < 0 else f"rank {event.rank}, rollout {event.rollout_id}"
        report.problems.append(f"{where}: {event.problem}")


@contextlib.contextmanager
def _running_ranks(config: TrainerConfig) -> Iterator[list[_Rank]]:
    """Start the ranks, and stop whoever is left at the end."""
    context = _fork_server()
    config.log_dir.mkdir(parents=True, exist_ok=True)
    meeting_point = config.output_dir / "meeting-point"
    meeting_point.unlink(missing_ok=True)
    ranks: list[_Rank] = []
    try:
        for number in range(WORLD_SIZE):
            receiver, sender = context.Pipe(duplex=False)
            log_path = config.log_dir / f"rank-{number}.log"
            process = context.Process(
                target=_run_rank, args=(config, number, meeting_point, sender, log_path), name=f"rank-{number}"
            )
            # Only the rank holds the sending end after this, so the pipe ends when the rank does.
            with signals_held(), sender:
                process.start()
                ranks.append(_Rank(number=number, process=process, events=receiver, log_path=log_path))
        yield ranks
    finally:
        with signals_held():
            _stop(ranks)
            _stop_shipper(config.spool_dir)
            meeting_point.unlink(missing_ok=True)


def _fork_server() -> ForkServerContext:
    """Return the context of a fork server that has imported torch and megatron-core once for all ranks.

    Eight ranks that import them one by one take half a minute on two cores. Ctrl-C reaches neither it nor its ranks.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rollcast_demo.train"])
    # The server finds the preloaded module through its environment alone (before Python 3.14 it ignores `sys.path`).
    package_parent = str(Path(__file__).parents[1])
    inherited = {name: os.environ.get(name) for name in ("PYTHONPATH", "PYTHONWARNINGS")}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [package_parent, inherited["PYTHONPATH"]]))
    # megatron-core warns at length about accelerator libraries that a run on CPUs has no use for.
    os.environ["PYTHONWARNINGS"] = "ignore"
    # Before: starting it would let the signal through again.
    resource_tracker.ensure_running()
    # Whatever starts here inherits this, and keeps it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        forkserver.ensure_running()
    finally:
        for name, value in inherited.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    # Seconds in which Ctrl-C may come: a rank that is being started would not be known, and so not be stopped.
    first = context.Process(target=_do_nothing)
    first.start()
    first.join()
    return context


def _do_nothing() -> None:
    """Be a process that is there as soon as the fork server has imported everything."""


def _run_rank(config: TrainerConfig, rank: int, meeting_point: Path, events: Connection, log_path: Path) -> None:
    """Run one rank; the body of its process."""
    # An own session: Ctrl-C reaches the launcher alone, and whatever a rank starts is stopped with it.
    os.setsid()
    with log_path.open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    # Only the ranks may pay for this import, and the fork server has already done so.
    from rollcast_demo import train

    train.join_and_train(config, rank=rank, meeting_point=meeting_point, report=events.send)


def _stop(ranks: list[_Rank]) -> None:
    """End every rank, and what it started, that is still there: asked first, forced after a grace time."""
    for rank in ranks:
        _signal_group(rank, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_GRACE_S
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))
    for rank in ranks:
        _signal_group(rank, signal.SIGKILL)
    for rank in ranks:
        rank.process.join(_STOP_GRACE_S)
        rank.events.close()


def _stop_shipper(spool_dir: Path) -> None:
    """Wait for the shipper that a rank has started to finish; one that cannot, as Kafka is gone, is ended."""
    shippers = [
        process
        for process in psutil.process_iter(["cmdline"])
        if f"--spool={spool_dir}" in (process.info["cmdline"] or [])
    ]
    for stop in (psutil.Process.terminate, psutil.Process.kill):
        _, shippers = psutil.wait_procs(shippers, timeout=_STOP_GRACE_S)
        for process in shippers:
            with contextlib.suppress(psutil.NoSuchProcess):
                stop(process)


def _signal_group(rank: _Rank, number: signal.Signals) -> None:
    """Signal a rank's process group; a rank too young to have one is signalled alone."""
    assert rank.process.pid is not None
    try:
        os.killpg(rank.process.pid, number)
    except ProcessLookupError:
        if rank.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.process.pid, number)
