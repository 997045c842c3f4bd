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
    """Check dumps against their manifests: size, SHA-256, samples, shards. Exit status: 0 all are sound, 1 not.

    A file NAME.unknown-DIGEST stood at a dump's name without a manifest, and was kept when the dump came; it is told,
    is no fault while it has that digest, and may be deleted.
    """
    from rollcast.consumer.verification import verify as verdicts

    sound = bad = unknown = 0
    for path in paths:
        for verdict in verdicts(path):
            if verdict.problem is not None:
                bad += 1
                typer.echo(f"BAD  {verdict.path}: {verdict.problem}")
                continue
            if verdict.unknown:
                unknown += 1
                if not quiet:
                    typer.echo(f"kept {verdict.path}: it had a dump's name and no manifest; may be deleted")
                continue
            sound += 1
            if not quiet:
                typer.echo(f"ok   {verdict.path}: {_summary(verdict)}")
    aside = f", {unknown} kept aside" if unknown else ""
    typer.echo(f"{sound} sound, {bad} bad{aside}" if sound + bad else f"no dump is there{aside}")
    if bad or not sound:
        raise typer.Exit(1)


def _summary(verdict: "Verdict") -> str:
    manifest = verdict.manifest
    if manifest is None:
        return ""
    counts = f"{manifest.samples} samples, {manifest.shards} shards, {manifest.file_bytes} bytes"
    return f"{counts}; incomplete: {manifest.missing}" if manifest.missing else counts
