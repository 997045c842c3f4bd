"""`rollcast consume`: the daemon in the foreground."""

import asyncio
import gc
import logging
import os
import signal
from types import FrameType
from typing import Annotated

import typer

from rollcast.consumer.cli.log import log_of_a_daemon
from rollcast.consumer.cli.options import (
    Bootstrap,
    ConnectTimeout,
    MaxResidentBytes,
    MaxScratchBytes,
    ScratchDir,
    TopicPrefix,
)
from rollcast.consumer.config import ConsumeConfig, Layout
from rollcast.consumer.retention import Retention
from rollcast.schemas import Topics
from rollcast.schemas.allocator import keep_freed_memory
from rollcast.schemas.kafka_log import client_log_shown_after, hide_client_log
from rollcast.schemas.kafka_security import read_kafka_security

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_log = logging.getLogger("rollcast.consumer")


def consume(
    *,
    bootstrap: Bootstrap,
    dump_path: Annotated[
        str,
        typer.Option(
            help="Where dumps go: a path with {run_id} and {rollout_id}, 'DIR/{run_id}/{rollout_id}.pt', or "
            "{rollout_id:06d}; the file's name ends with .pt, and may have {rank} and {attempt} too."
        ),
    ],
    layout: Annotated[
        Layout, typer.Option(help="Whose tools read the dumps; miles: a file for each shard, with {rank} in its name.")
    ] = Layout.SLIME,
    keep_last: Annotated[int | None, typer.Option(help="Remove all but so many of a run's newest dumps.")] = None,
    keep_every: Annotated[
        int | None, typer.Option(help="Keep each rollout that is a multiple of this as well.")
    ] = None,
    max_dump_bytes: Annotated[
        int | None, typer.Option(help="Remove a run's oldest dumps when all of them are larger than this.")
    ] = None,
    pin: Annotated[list[int] | None, typer.Option(help="A rollout that is never removed; may be repeated.")] = None,
    topic_prefix: TopicPrefix = "rollcast",
    group: Annotated[
        str, typer.Option(help="Consumer group; its members share the work, and need the same --dump-path.")
    ] = "rollcast",
    partitions: Annotated[int, typer.Option(min=1, help="Partitions of the records topic, if it is created.")] = 4,
    replication_factor: Annotated[int, typer.Option(min=1, help="Replicas of topics that are created.")] = 1,
    create_topics: Annotated[bool, typer.Option(help="Create topics that do not exist.")] = True,
    incomplete_after_s: Annotated[
        float, typer.Option(help="A rollout without a new record for so long is written as incomplete.")
    ] = 600.0,
    max_resident_bytes: MaxResidentBytes = 256 * 1024**2,
    scratch_dir: ScratchDir = "",
    max_scratch_bytes: MaxScratchBytes = 64 * 1024**3,
    connect_timeout_s: ConnectTimeout = 15.0,
    shutdown_timeout_s: Annotated[float, typer.Option(help="Bound on a graceful stop.")] = 30.0,
    stall_after_s: Annotated[
        float, typer.Option(help="A Kafka client that brings nothing for so long while there is lag is replaced.")
    ] = 120.0,
    http_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Serve /metrics, /healthz and /readyz here; 0: any free port.")
    ] = None,
    http_host: Annotated[str, typer.Option(help="Address to serve them at.")] = "127.0.0.1",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Turn the records of the topic into verified dumps and metrics, until Ctrl-C or SIGTERM.

    SASL and TLS settings are read from the environment, ROLLCAST_SECURITY_PROTOCOL and its like; see the README.
    Stops gracefully and exits with 0; a second signal ends it at once, which loses nothing either.
    """
    config = ConsumeConfig(
        bootstrap_servers=bootstrap,
        dump_path=dump_path,
        layout=layout,
        retention=Retention(
            keep_last=keep_last, keep_every=keep_every, max_bytes=max_dump_bytes, pinned=frozenset(pin or ())
        ),
        topics=Topics(topic_prefix),
        group_id=group,
        create_topics=create_topics,
        partitions=partitions,
        replication_factor=replication_factor,
        incomplete_after_s=incomplete_after_s,
        max_resident_bytes=max_resident_bytes,
        scratch_dir=scratch_dir,
        max_scratch_bytes=max_scratch_bytes,
        connect_timeout_s=connect_timeout_s,
        shutdown_timeout_s=shutdown_timeout_s,
        security=read_kafka_security(os.environ),
        stall_after_s=stall_after_s,
        http_port=http_port,
        http_host=http_host,
    )
    _configure_logging(log_level)
    keep_freed_memory()
    early = _EarlySignals()
    _log.info("starting")
    asyncio.run(_serve(config, early))


class _EarlySignals:
    """Notes a signal to stop until the event loop takes over: loading torch takes seconds.

    Attributes:
        stop: whether one came.
    """

    def __init__(self) -> None:
        self.stop = False
        for number in _SIGNALS:
            signal.signal(number, self._note)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.stop = True
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)


async def _serve(config: ConsumeConfig, early: _EarlySignals) -> None:
    import torch

    from rollcast.consumer.daemon import Daemon

    # The daemon's work has threads already; those of torch would spin for a while after each of its small pieces.
    torch.set_num_threads(1)
    daemon = Daemon(config)
    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        # From now on the default handler is in charge: a second signal ends the process.
        for each in _SIGNALS:
            loop.remove_signal_handler(each)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _log.info("%s: stopping", number.name)
        daemon.shutdown()

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop, number)
    if early.stop:
        _log.info("stopping before the start")
        daemon.shutdown()
    # What the imports left is never garbage; walking it again and again would hold up the event loop for 0.1 s.
    gc.freeze()
    try:
        async with client_log_shown_after(daemon.ready):
            await daemon.run()
    finally:
        gc.unfreeze()


def _configure_logging(level: str) -> None:
    levels = logging.getLevelNamesMapping()
    if level.upper() not in levels:
        known = "debug, info, warning or error"
        raise typer.BadParameter(f"{level!r} is not a log level; use {known}", param_hint="--log-level")
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.WARNING, format=form, handlers=[log_of_a_daemon()])
    logging.getLogger("rollcast").setLevel(levels[level.upper()])
    if levels[level.upper()] > logging.DEBUG:
        hide_client_log()
