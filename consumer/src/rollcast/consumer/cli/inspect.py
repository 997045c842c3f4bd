"""`rollcast inspect`: what is in a dump."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollcast.consumer.container import check_beginning

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from rollcast.consumer.metrics import Metric
    from rollcast.consumer.store import Manifest

_HEAD = {"format_version": "format version", "rollout_id": "rollout", "call": "policy-loss call", "rank": "rank"}


def inspect(file: Annotated[Path, typer.Argument(help="A dump, .pt.")]) -> None:
    """Show what is in a dump: rollout, samples, columns, layout, manifest."""
    # First: loading torch takes seconds, in which a mistyped name would not be told.
    check_beginning(file)
    from rich.console import Console
    from rich.text import Text

    from rollcast.consumer.dump_file import load_dump, samples_of

    manifest, problem = _manifest_of(file)
    payload = load_dump(file)
    console = Console()
    samples = samples_of(payload)
    # No title of the table, which would fold it: it is there to be copied.
    console.print(Text(str(file), style="italic"), soft_wrap=True)
    console.print(_overview(file, payload, len(samples)), _columns(samples))
    if shards := payload.get("dp_shards"):
        console.print(_layout(shards))
    if manifest is None:
        console.print(problem, markup=False, soft_wrap=True)
        return
    console.print(_manifest(manifest))
    # Beside the table, which would fold it on a terminal of 80 columns.
    console.print(Text(f"SHA-256 {manifest.sha256}, as the file has it"), soft_wrap=True)
    if manifest.metrics:
        console.print(_metrics(manifest.metrics))


def _manifest_of(file: Path) -> tuple["Manifest | None", str]:
    """Returns the manifest of the dump, which is checked against it; else None and why there is none."""
    from rollcast.consumer.dump_file import check_against, described_in
    from rollcast.consumer.errors import DumpFileError
    from rollcast.consumer.store.manifest import manifest_path

    try:
        described = described_in(file)
    except (DumpFileError, OSError) as exc:
        return None, f"{manifest_path(file)} is not used: {exc}"
    if described is None:
        return None, "No manifest beside it."
    manifest, entry = described
    check_against(file, entry)
    return manifest, ""


def _table(title: str | None, *headers: str) -> "Table":
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=bool(headers))
    for header in headers:
        table.add_column(header, overflow="fold")
    return table


def _row(table: "Table", *cells: object) -> None:
    from rich.text import Text

    table.add_row(*(Text(str(cell)) for cell in cells))


def _overview(file: Path, payload: dict[str, Any], sample_count: int) -> "Table":
    table = _table(None)
    for name, label in _HEAD.items():
        if name in payload:
            _row(table, label, payload[name])
    _row(table, "samples", sample_count)
    _row(table, "file bytes", file.stat().st_size)
    for name, value in payload.items():
        if name not in {*_HEAD, "samples", "dp_shards"}:
            _row(table, name, _kind(value))
    return table


def _columns(samples: list[Any]) -> "Table":
    table = _table("columns of the samples", "name", "kind", "shape or value, from", "to", "absent in")
    columns: dict[str, list[Any]] = {}
    for sample in samples:
        for name, value in sample.items():
            columns.setdefault(name, []).append(value)
    for name, values in columns.items():
        kinds = Counter(_kind(value) for value in values)
        ordered = _ordered(values)
        bounds = (_extent(ordered[0]), _extent(ordered[-1])) if ordered else ("", "")
        _row(table, name, ", ".join(kinds), *bounds, len(samples) - len(values) or "")
    return table


def _ordered(values: list[Any]) -> list[Any]:
    """Returns the values that can be ordered: numbers by value, tensors by shape; nothing if they are mixed."""
    import torch

    present = [value for value in values if value is not None]
    if all(isinstance(value, torch.Tensor) for value in present):
        return sorted(present, key=lambda value: tuple(value.shape))
    if all(isinstance(value, (bool, int, float)) for value in present):
        return sorted(present)
    return []


def _kind(value: object) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        return str(value.dtype)
    return _marker(value) or type(value).__name__


def _marker(value: object) -> str | None:
    """Returns what stands in the place of a value that the contract cannot carry, in words; None for any other."""
    from rollcast.schemas.tensors import type_of_marked

    name = type_of_marked(value)
    return None if name is None else f"marker for {name}"


def _extent(value: Any) -> str:
    import torch

    return str(list(value.shape)) if isinstance(value, torch.Tensor) else f"{value}"


def _layout(shards: list[Any]) -> "Table":
    table = _table("data-parallel shards", "data_parallel_rank", "rank", "layout")
    for shard in shards:
        rest = {name: value for name, value in shard.items() if name not in ("data_parallel_rank", "rank")}
        shown = "; ".join(f"{name} {_short(value)}" for name, value in rest.items() if value is not None)
        _row(table, shard.get("data_parallel_rank"), shard.get("rank"), shown)
    return table


def _short(value: object) -> str:
    import torch

    text = f"tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else _marker(value) or repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _manifest(manifest: "Manifest") -> "Table":
    table = _table("manifest")
    rows: dict[str, object] = {
        "run": manifest.id.run_id,
        "attempt": manifest.id.attempt,
        "complete": manifest.complete,
        "missing": manifest.missing or None,
        "shards": manifest.shards,
        "parts": manifest.parts,
        "duplicates": manifest.duplicates,
        "replaced values": manifest.replaced_values,
        "raw bytes": manifest.raw_bytes,
        "wire bytes": manifest.wire_bytes,
        "offsets": ", ".join(f"{span.partition}: {span.first}..{span.last}" for span in manifest.offsets),
        "versions": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
    }
    for name, value in rows.items():
        if value is not None:
            _row(table, name, value)
    return table


def _metrics(metrics: "Sequence[Metric]") -> "Table":
    """Returns the table; columns of what was left out only where something was, to fit in 80 columns of text."""
    headers = ["name", "per rollout", "per token", "rollouts", "tokens"]
    left_out = {
        header: counts
        for header, counts in {
            "non-finite": [metric.non_finite_count for metric in metrics],
            "missing": [metric.missing_count for metric in metrics],
        }.items()
        if any(counts)
    }
    table = _table("metrics", *headers, *left_out)
    table.box, table.pad_edge, table.collapse_padding, table.columns[0].no_wrap = None, False, True, True
    for index, metric in enumerate(metrics):
        means = ("-" if mean is None else f"{mean:.6g}" for mean in (metric.per_rollout_mean, metric.per_token_mean))
        counts = (each[index] for each in left_out.values())
        _row(table, metric.name, *means, metric.rollout_count, metric.token_count, *counts)
    return table
