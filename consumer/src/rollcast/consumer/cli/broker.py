"""`rollcast broker`: a real Kafka in the foreground, until it is told to stop."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from rollcast.consumer.broker import BOOTSTRAP_VARIABLE, BrokerConfig, BrokerError, ExternalBroker, running_broker

if TYPE_CHECKING:
    from types import FrameType


def broker(
    port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="Port on 127.0.0.1; if left out, ROLLCAST_BOOTSTRAP_SERVERS' or a free one."
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Folder for records and log; if left out, they go when the broker stops."),
    ] = None,
    heap_mb: Annotated[int, typer.Option(help="Upper bound of the JVM's heap, in MB.")] = 512,
) -> None:
    """Run an Apache Kafka broker on this machine until Ctrl-C or SIGTERM.

    Prints its address on a line of its own as soon as it answers. Uses a container if a Docker engine answers,
    else Kafka on a JVM, which is fetched the first time. If ROLLCAST_BOOTSTRAP_SERVERS names another broker, only says
    so; if it names a port of this machine on which nobody listens, the broker is started there.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    try:
        config = BrokerConfig(port=port, data_dir=data_dir, heap_mb=heap_mb)
        with running_broker(config, report=_report) as running:
            if isinstance(running, ExternalBroker):
                _check_named(running, port, data_dir)
            typer.echo(running.bootstrap_servers)
            if running.kind == "external":
                typer.echo(f"This is {running.description}; it is used as it is, not started or stopped here.")
            else:
                typer.echo(
                    f"{running.description}. In another shell: "
                    f"export {BOOTSTRAP_VARIABLE}={running.bootstrap_servers} - Ctrl-C here stops it."
                )
            running.wait()
    except KeyboardInterrupt:
        _report("Stopped.")
    except BrokerError as error:
        _report(f"rollcast broker: {error}")
        raise typer.Exit(2) from None


def _check_named(named: ExternalBroker, port: int | None, data_dir: Path | None) -> None:
    if not named.answers():
        raise BrokerError(
            f"nothing answers at {named.bootstrap_servers}, which {BOOTSTRAP_VARIABLE} names; start that broker, or "
            "unset the variable to get one here"
        )
    if data_dir is not None or (port is not None and not named.bootstrap_servers.endswith(f":{port}")):
        raise BrokerError(
            f"--port and --data-dir do not reach the broker at {named.bootstrap_servers}, which {BOOTSTRAP_VARIABLE} "
            "names; leave them out, or unset the variable to get one here"
        )


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _report(line: str) -> None:
    typer.echo(line, err=True)
