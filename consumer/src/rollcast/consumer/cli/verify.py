"""`rollcast verify`: whether dumps are what their manifests say."""

import re
import shlex
from collections import defaultdict
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollcast.consumer.cli.log import show_warnings
from rollcast.schemas import TRAIN_STREAM
from rollcast.schemas.sizes import counted

if TYPE_CHECKING:
    from rollcast.consumer.verification import Verdict

# An older attempt, which is not made again while a newer one is there, or nobody's dump.
_ASIDE = re.compile(r"\.(?:attempt-\d+|unknown-[0-9a-f]+)\b")


def verify(
    paths: Annotated[list[Path], typer.Argument(help="Dumps, manifests, or folders with dumps at any depth.")],
    *,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show only what is not sound.")] = False,
) -> None:
    """Check dumps against their manifests: size, SHA-256, samples, shards. Exit status: 0 all are sound, 1 not.

    One that this user may not read is told as `shut`: nothing is known of it. What a trainer has written inline has no
    manifest, so that nothing can prove it sound.

    A file NAME.unknown-DIGEST stood at a dump's name with another content, and was kept when the dump came; it is
    told, is no fault while it has that digest, and may be deleted. Nor is a torch file of something else, such as a
    checkpoint, of which no manifest tells: that is `else`.
    """
    from rollcast.consumer.verification import verify as verdicts

    show_warnings()
    sound = unknown = foreign = shut = 0
    bad: list[Verdict] = []
    for path in paths:
        for verdict in verdicts(path):
            if verdict.shut:
                shut += 1
                typer.echo(f"shut {verdict}")
                continue
            if verdict.foreign:
                foreign += 1
                if not quiet:
                    typer.echo(f"else {verdict}")
                continue
            if verdict.problem is not None:
                bad.append(verdict)
                typer.echo(f"BAD  {verdict}")
                continue
            if verdict.unknown:
                unknown += 1
                if not quiet:
                    typer.echo(f"kept {verdict.path}: it had a dump's name and another content; may be deleted")
                continue
            sound += 1
            if not quiet:
                typer.echo(f"ok   {verdict.path}: {_summary(verdict)}")
    if commands := _remedies(bad):
        typer.echo("To make them again, with --bootstrap, --dump-path and --layout as `rollcast consume` has them:")
        for command in commands:
            typer.echo(f"  {command}")
    if shut:
        typer.echo(
            "Whether those that are shut are sound is not known: this user may not read them. Ask again as their owner."
        )
    counts = {"shut": shut, "kept aside": unknown, "of something else": foreign}
    others = "".join(f", {count} {words}" for words, count in counts.items() if count)
    nothing = f"no dump is in {', '.join(map(str, paths))}"
    typer.echo(f"{sound} sound, {len(bad)} bad{others}" if sound or bad or shut else f"{nothing}{others}")
    if bad or shut or not sound:
        raise typer.Exit(1)


def _remedies(bad: "Iterable[Verdict]") -> list[str]:
    """Returns the commands that make these dumps again, of those that are known to have come by way of Kafka."""
    from rollcast.consumer.template import DUMP_SUFFIX
    from rollcast.consumer.verification import is_folder

    known: defaultdict[str, set[int]] = defaultdict(set)
    unknown = False
    for verdict in bad:
        # Nothing can be made again where a folder stands.
        if _ASIDE.search(verdict.path.name) or is_folder(verdict.path):
            continue
        rollout = verdict.manifest.id if verdict.manifest is not None else None
        if rollout is None or not rollout.run_id.isprintable():
            # Of a file that has no manifest, nothing says that it came by way of Kafka.
            unknown |= rollout is not None or (verdict.has_bad_manifest and DUMP_SUFFIX in verdict.path.suffixes)
        elif rollout.stream == TRAIN_STREAM:
            known[rollout.run_id].add(rollout.rollout_id)
    which = [(shlex.quote(run_id), span) for run_id in sorted(known) for span in _spans(known[run_id])]
    which += [("RUN", "ROLLOUT")] * unknown
    command = "rollcast rebuild --bootstrap HOST:PORT --dump-path TEMPLATE"
    return [f"{command} --run {run} --rollout {span}" for run, span in which]


def _spans(rollouts: Iterable[int]) -> list[str]:
    """Returns `7` or `7..12` for each row of numbers that follow each other."""
    numbered = enumerate(sorted(rollouts))
    rows = [[number for _, number in row] for _, row in groupby(numbered, lambda pair: pair[1] - pair[0])]
    return [f"{row[0]}..{row[-1]}" if len(row) > 1 else str(row[0]) for row in rows]


def _summary(verdict: "Verdict") -> str:
    manifest = verdict.manifest
    if manifest is None:
        return ""
    counts = f"{counted(manifest.samples, 'sample')}, {counted(manifest.shards, 'shard')}, {manifest.file_bytes} bytes"
    return f"{counts}; incomplete: {manifest.missing}" if manifest.missing else counts
