"""The `rollcast` command."""

import os
import sys

import typer

from rollcast.consumer.cli.broker import broker
from rollcast.consumer.cli.consume import consume
from rollcast.consumer.cli.diff import diff
from rollcast.consumer.cli.inspect import inspect
from rollcast.consumer.errors import ConsumerError, ShutdownTimeoutError
from rollcast.schemas import ContractError

__all__ = ["app", "main"]

app = typer.Typer(
    name="rollcast",
    help="Streams RL training records through Apache Kafka into verified train dumps and mismatch metrics.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (consume, inspect, diff, broker):
    app.command()(command)


def main() -> None:
    """Runs the command; an error of ours is one sentence on stderr, and exit status 2."""
    try:
        app()
    except (ConsumerError, ContractError) as exc:
        print(f"rollcast: {exc}", file=sys.stderr)  # noqa: T201 - the command's own output
        if isinstance(exc, ShutdownTimeoutError):
            # A thread may hang in a write; the interpreter would wait for it.
            sys.stderr.flush()
            os._exit(2)
        sys.exit(2)
