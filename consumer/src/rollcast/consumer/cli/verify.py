"""`rollcast verify`: whether dumps are what their manifests say."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rollcast.consumer.verification import Verdict


def verify(
    paths: Annotated[list[Path], typer.Argument(help="Dumps, manifests, or folders with dumps at any depth.")],
    *,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show only what is not sound.")] = False,
) -> None:
    """Check dumps against their manifests: size, SHA-256, samples, shards. Exit status: 0 all are sound, 1 not."""
    from rollcast.consumer.verification import verify as verdicts

    sound = bad = 0
    for path in paths:
        for verdict in verdicts(path):
            if verdict.problem is not None:
                bad += 1
                typer.echo(f"BAD  {verdict.path}: {verdict.problem}")
                continue
            sound += 1
            if not quiet:
                typer.echo(f"ok   {verdict.path}: {_summary(verdict)}")
    typer.echo(f"{sound} sound, {bad} bad" if sound + bad else "no dump is there")
    if bad or not sound:
        raise typer.Exit(1)


def _summary(verdict: "Verdict") -> str:
    manifest = verdict.manifest
    if manifest is None:
        return ""
    counts = f"{manifest.samples} samples, {manifest.shards} shards, {manifest.file_bytes} bytes"
    return f"{counts}; incomplete: {manifest.missing}" if manifest.missing else counts
