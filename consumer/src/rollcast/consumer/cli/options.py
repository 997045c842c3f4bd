"""Options that several subcommands have."""

from typing import Annotated, TypeAlias

import typer

Bootstrap: TypeAlias = Annotated[
    str, typer.Option(envvar="ROLLCAST_BOOTSTRAP_SERVERS", help="Kafka brokers, host:port, comma-separated.")
]
TopicPrefix: TypeAlias = Annotated[str, typer.Option(help="First part of the topic names.")]
MaxResidentBytes: TypeAlias = Annotated[
    int, typer.Option(min=1, help="Cap on the records of unfinished rollouts in memory, without their tensors.")
]
ScratchDir: TypeAlias = Annotated[
    str, typer.Option(help="Folder for the tensors of unfinished rollouts; by default where the dumps go.")
]
MaxScratchBytes: TypeAlias = Annotated[int, typer.Option(min=64 * 1024**2, help="Cap on the tensors in that folder.")]
ConnectTimeout: TypeAlias = Annotated[float, typer.Option(help="Bound on reaching a broker at start.")]
