"""The demo from beginning to end: broker, daemon, eight ranks, comparison."""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from rollcast.consumer.broker import running_broker
from rollcast.schemas.addresses import check_bootstrap_servers
from rollcast_demo.compare import DumpPair, await_dumps, compare
from rollcast_demo.config import TrainerConfig
from rollcast_demo.daemon import running_daemon
from rollcast_demo.errors import DemoError
from rollcast_demo.launch import run_trainers
from rollcast_demo.progress import ProgressView
from rollcast_demo.table import print_stalls, print_verdicts

_MARK = ".rollcast-demo"
_DUMP_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """What the command line can say.

    Attributes:
        rollouts: Rollouts of each parallel layout.
        output_dir: Folder for dumps and logs, an absolute path; what an earlier demo left there is removed.
        bootstrap_servers: Kafka to use; None: a broker of its own.
        keep: Keep spool and logs of a run that went well.
    """

    rollouts: int
    output_dir: Path
    bootstrap_servers: str | None
    keep: bool

    def __post_init__(self) -> None:
        """Refuses an address that is none."""
        if self.bootstrap_servers is not None:
            check_bootstrap_servers(self.bootstrap_servers)


def run_demo(options: DemoOptions, console: Console) -> bool:
    """Run everything, print the table, and return whether every dump is there and equal.

    Raises:
        DemoError: A process failed or took too long; nothing is left running.
        BrokerError: There is no broker and none can be started.
    """
    start = time.monotonic()
    _clear(options.output_dir)
    dump_template = str(options.output_dir / "dumps" / "{run_id}" / "{rollout_id}.pt")
    with ExitStack() as stack:
        servers = options.bootstrap_servers
        if servers is None:
            servers = stack.enter_context(
                running_broker(report=lambda line: console.print(line, markup=False, highlight=False))
            ).bootstrap_servers
        config = TrainerConfig(
            output_dir=options.output_dir,
            bootstrap_servers=servers,
            rollouts=options.rollouts,
            # A Kafka that is somebody's may hold the topics of earlier demos, and of work that is none of ours.
            topic_prefix=f"rollcast-demo-{time.time_ns() // 10**9}",
        )
        console.print(f"Kafka at {servers}, topics {config.topic_prefix}.*", highlight=False)
        pairs = _pairs(config, dump_template)
        daemon = stack.enter_context(
            running_daemon(
                bootstrap_servers=servers,
                topic_prefix=config.topic_prefix,
                dump_template=dump_template,
                log_path=config.log_dir / "daemon.log",
            )
        )
        view = stack.enter_context(ProgressView(console, rollouts=len(pairs)))
        reports = run_trainers(config, on_event=view.trained, watch=daemon.check)
        await_dumps(pairs, daemon, timeout_s=_DUMP_TIMEOUT_S, on_count=view.dumped)
    verdicts = [compare(pair) for pair in pairs]
    print_verdicts(console, verdicts)
    print_stalls(console, reports)
    good = sum(verdict.good for verdict in verdicts)
    console.print(
        f"{good} of {len(verdicts)} dumps that came through Kafka are bit-equal to the inline ones, "
        f"after {time.monotonic() - start:.0f} s.",
        style="green" if good == len(verdicts) else "red",
        highlight=False,
    )
    everything_good = good == len(verdicts) and not any(report.problems for report in reports)
    if everything_good and not options.keep:
        shutil.rmtree(config.spool_dir)
        shutil.rmtree(config.log_dir)
    _print_places(console, options.output_dir)
    return everything_good


def _pairs(config: TrainerConfig, dump_template: str) -> list[DumpPair]:
    return [
        DumpPair(
            run_id=run_id,
            rollout_id=rollout_id,
            through_kafka=Path(dump_template.format(run_id=run_id, rollout_id=rollout_id)),
            inline=Path(config.inline_template.format(run_id=run_id, rollout_id=rollout_id)),
        )
        for run_id in map(config.run_id, config.layouts)
        for rollout_id in range(config.rollouts)
    ]


def _clear(output_dir: Path) -> None:
    """Make the output folder, empty but for a mark; only a folder with the mark is ever emptied."""
    mark = output_dir / _MARK
    output_dir.mkdir(parents=True, exist_ok=True)
    if not mark.exists() and any(output_dir.iterdir()):
        raise DemoError(f"{output_dir} has other files than those of a demo in it; give another folder with --output")
    for entry in output_dir.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    mark.touch()


def _print_places(console: Console, output_dir: Path) -> None:
    for name, what in (
        ("dumps", "dumps that came through Kafka, each with its manifest"),
        ("inline", "the same rollouts, written by the trainers themselves"),
        ("spool", "bundles and log of the shipper"),
        ("logs", "logs of the ranks and of the daemon"),
    ):
        if (output_dir / name).exists():
            console.print(f"  {output_dir / name}: {what}", highlight=False, soft_wrap=True)
