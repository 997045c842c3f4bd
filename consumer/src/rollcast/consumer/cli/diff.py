"""`rollcast diff`: whether two dumps are equal."""

from pathlib import Path
from typing import Annotated

import typer

from rollcast.consumer.container import check_beginning
from rollcast.schemas.sizes import counted


def diff(
    a: Annotated[Path, typer.Argument(help="A dump, .pt.")],
    b: Annotated[Path, typer.Argument(help="Another one.")],
    *,
    rtol: Annotated[float, typer.Option(min=0, help="Relative tolerance of floating-point values.")] = 0.0,
    atol: Annotated[float, typer.Option(min=0, help="Absolute tolerance of floating-point values.")] = 0.0,
    max_differences: Annotated[int, typer.Option(min=1, help="How many differences are shown.")] = 10,
) -> None:
    """Compare two dumps, bit for bit unless a tolerance is given. Exit status: 0 equal, 1 different, 2 trouble."""
    # First: loading torch takes seconds, in which a mistyped name would not be told.
    check_beginning(a)
    check_beginning(b)
    from rollcast.consumer.difference import differences
    from rollcast.consumer.dump_file import load_dump, samples_of

    left, right = load_dump(a), load_dump(b)
    found = differences(left, right, rtol=rtol, atol=atol, limit=max_differences + 1)
    if not found:
        within = f" within rtol {rtol:g}, atol {atol:g}" if rtol or atol else ""
        typer.echo(f"equal{within}: {counted(len(samples_of(left)), 'sample')}")
        return
    for difference in found[:max_differences]:
        typer.echo(str(difference))
    if len(found) > max_differences:
        typer.echo("... and more; --max-differences shows them")
    raise typer.Exit(1)
