"""What the demo prints at its end."""

from __future__ import annotations

from itertools import groupby
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table

from rollcast.schemas.sizes import size_in_words
from rollcast_demo.compare import Verdict
from rollcast_demo.launch import RunReport


def print_verdicts(console: Console, verdicts: list[Verdict]) -> None:
    """Print a table for each run with one row for each rollout, then the differences, if there are any."""
    for run_id, of_run in groupby(verdicts, key=lambda verdict: verdict.pair.run_id):
        table = Table(title=run_id, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name in ("rollout", "samples", "parts", "raw", "wire", "|d|", "k3", "reward"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("verdict", no_wrap=True)
        for verdict in of_run:
            table.add_row(*_cells(verdict))
        console.print(table)
    console.print(
        "raw and wire: bytes of the tensors and of the Kafka records. These samples are some 20 tokens long, so "
        "names and framing outweigh the tensors.",
        "|d| and k3: mean over tokens; reward: mean over rollouts.",
        sep="\n",
        style="dim",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    for verdict in verdicts:
        for difference in verdict.differences:
            where = f"{verdict.pair.run_id} rollout {verdict.pair.rollout_id}"
            console.print(f"{where}: {difference}", style="red", markup=False, highlight=False, soft_wrap=True)


def _cells(verdict: Verdict) -> list[str]:
    rollout = str(verdict.pair.rollout_id)
    manifest = verdict.manifest
    if manifest is None:
        return [rollout, *[""] * 7, "[red]missing"]
    metrics = {metric.name: metric for metric in manifest.metrics}
    return [
        rollout,
        str(manifest.samples),
        str(manifest.parts),
        size_in_words(manifest.raw_bytes),
        size_in_words(manifest.wire_bytes),
        _number(metrics["train_rollout_logprob_abs_diff"].per_token_mean, ".5f"),
        _number(metrics["k3_kl"].per_token_mean, ".2e"),
        _number(metrics["reward"].per_rollout_mean, ".3f"),
        "[red]differs" if verdict.differences else "[green]equal",
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def print_stalls(console: Console, reports: list[RunReport]) -> None:
    """Print how long training stood still for each way of dumping, and what the rollouts held."""
    for report in reports:
        rollouts = list(report.rollouts.values())
        inline_s, publish_s = (median(numbers[name] for numbers in rollouts) for name in ("inline_s", "publish_s"))
        held = ", ".join(
            f"{sum(numbers[name] for numbers in rollouts):.0f} {words}"
            for name, words in (
                ("truncated", "truncated"),
                ("masked", "fully masked"),
                ("shared", "that continue another sample's rollout"),
            )
        )
        console.print(
            f"{report.run_id}: training stood still for {1000 * inline_s:.1f} ms a rollout with the inline dump, "
            f"{1000 * publish_s:.1f} ms with publish (slowest rank, median)",
            f"  ranks up after {report.ready_s:.0f} s, done after {report.finished_s:.0f} s; samples: {held}",
            sep="\n",
            highlight=False,
            soft_wrap=True,
        )
        for problem in report.problems:
            console.print(f"  {problem}", style="red", markup=False, highlight=False, soft_wrap=True)
