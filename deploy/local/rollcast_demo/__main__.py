"""The command `python -m rollcast_demo`."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from rollcast.consumer.broker import BrokerError
from rollcast.schemas import ContractError
from rollcast_demo.errors import DemoError

_WIDTH_WITHOUT_TERMINAL = 120


def main(
    rollouts: Annotated[int, typer.Option(min=1, help="Rollouts of each parallel layout.")] = 6,
    output: Annotated[Path, typer.Option(file_okay=False, help="Folder for dumps and logs.")] = Path("demo-output"),
    bootstrap: Annotated[
        str | None, typer.Option(help="Kafka to use, host:port; a broker of its own if left out.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep spool and logs of a run that went well.")] = False,
) -> None:
    """Train a tiny model on 8 ranks, stream its records through Kafka, and compare the dumps that come out."""
    signal.signal(signal.SIGTERM, _interrupt)
    plain = Console()
    console = plain if plain.is_terminal else Console(width=_WIDTH_WITHOUT_TERMINAL)
    try:
        # It loads torch, in which Ctrl-C may come as well.
        from rollcast_demo.demo import DemoOptions, run_demo

        options = DemoOptions(rollouts=rollouts, output_dir=output.absolute(), bootstrap_servers=bootstrap, keep=keep)
        good = run_demo(options, console)
    except (DemoError, BrokerError, ContractError) as error:
        console.print(f"The demo failed: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.print("Stopped.")
        raise typer.Exit(130) from None
    raise typer.Exit(0 if good else 1)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    typer.run(main)
