"""`rollcast rebuild`: dumps again, from the records that are still on the topic."""

import asyncio
import os
import re
import shlex
from typing import Annotated

import typer

from rollcast.consumer.cli.log import show_warnings
from rollcast.consumer.cli.options import (
    Bootstrap,
    ConnectTimeout,
    MaxResidentBytes,
    MaxScratchBytes,
    ScratchDir,
    TopicPrefix,
)
from rollcast.consumer.config import ConsumeConfig, Layout
from rollcast.schemas import Topics
from rollcast.schemas.kafka_log import hide_client_log
from rollcast.schemas.kafka_security import read_kafka_security

_ROLLOUTS = re.compile(r"(\d{1,18})(?:\.\.(\d{1,18}))?\Z")
_MOST_ROLLOUTS = 100_000


def rebuild(
    *,
    bootstrap: Bootstrap,
    dump_path: Annotated[str, typer.Option(help="Where dumps go, as `rollcast consume` was given it.")],
    run: Annotated[str, typer.Option(help="The run id.")],
    rollout: Annotated[str, typer.Option(help="A rollout, or the first and the last: 7 or 7..12.")],
    layout: Annotated[Layout, typer.Option(help="As `rollcast consume` was given it.")] = Layout.SLIME,
    topic_prefix: TopicPrefix = "rollcast",
    max_resident_bytes: MaxResidentBytes = 256 * 1024**2,
    scratch_dir: ScratchDir = "",
    max_scratch_bytes: MaxScratchBytes = 64 * 1024**3,
    connect_timeout_s: ConnectTimeout = 15.0,
) -> None:
    """Make dumps again that were lost, damaged or removed. Exit status: 0 all are there, 1 not, 2 trouble.

    A running `rollcast consume` is not disturbed. A sound dump is left as it is. SASL and TLS settings are read from
    the environment, as `rollcast consume` reads them.
    """
    config = ConsumeConfig(
        bootstrap_servers=bootstrap,
        dump_path=dump_path,
        layout=layout,
        topics=Topics(topic_prefix),
        create_topics=False,
        max_resident_bytes=max_resident_bytes,
        scratch_dir=scratch_dir,
        max_scratch_bytes=max_scratch_bytes,
        connect_timeout_s=connect_timeout_s,
        security=read_kafka_security(os.environ),
    )
    show_warnings()
    hide_client_log()
    if not asyncio.run(_rebuild(config, run, _rollouts(rollout))):
        raise typer.Exit(1)


def _rollouts(text: str) -> range:
    match = _ROLLOUTS.match(text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
    if not first <= last < first + _MOST_ROLLOUTS:
        told = f"{text!r} is no rollout and no range of at most {_MOST_ROLLOUTS}; use 7 or 7..12"
        raise typer.BadParameter(told, param_hint="--rollout")
    return range(first, last + 1)


async def _rebuild(config: ConsumeConfig, run_id: str, rollouts: range) -> bool:
    from rollcast.consumer.rebuilding import rebuild as rebuilding

    done, folders = True, set[str]()
    async for rebuilt in rebuilding(config, run_id, rollouts):
        typer.echo(f"rollout {rebuilt.rollout_id}: {'' if rebuilt.done else 'cannot be rebuilt: '}{rebuilt.told}")
        done &= rebuilt.done
        if rebuilt.path is not None:
            folders.add(shlex.quote(str(rebuilt.path.parent)))
    if folders:
        typer.echo(f"To check them: rollcast verify {' '.join(sorted(folders))}")
    return done
