"""The subcommands under one name."""

from importlib.metadata import version
from typing import Annotated

import typer

from rollcast.consumer.cli.broker import broker
from rollcast.consumer.cli.consume import consume
from rollcast.consumer.cli.diff import diff
from rollcast.consumer.cli.inspect import inspect
from rollcast.consumer.cli.rebuild import rebuild
from rollcast.consumer.cli.verify import verify

app = typer.Typer(
    name="rollcast",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain text: tables cut the names of options on a terminal of 80 columns.
    rich_markup_mode=None,
)
for subcommand in (consume, inspect, diff, verify, rebuild, broker):
    app.command()(subcommand)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"rollcast {version('rollcast')}")
        raise typer.Exit


@app.callback()
def rollcast(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Streams RL training records through Apache Kafka into verified train dumps and mismatch metrics."""
