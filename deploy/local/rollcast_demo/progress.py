"""Shows how far the demo is: a bar on a terminal, one plain line for each step elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rollcast_demo.config import Event


class ProgressView:
    """Counts rollouts and dumps; used as a context manager.

    Args:
        console: Where to show it.
        rollouts: How many rollouts will come, of all runs together.
    """

    def __init__(self, console: Console, *, rollouts: int) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._training = self._bars.add_task("rollouts trained", total=rollouts, note="starting 8 ranks")
        self._dumps = self._bars.add_task("dumps written   ", total=rollouts, note="")

    def __enter__(self) -> ProgressView:
        self._bars.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def trained(self, event: Event) -> None:
        """Show an event of the trainers; those of rank 0 stand for all."""
        if event.rank != 0:
            return
        if event.kind == "rollout":
            note = f"reward {event.numbers['reward']:.2f}"
            line = f"{event.run_id} rollout {event.rollout_id}: {note}"
        elif event.kind == "ready":
            note, line = event.run_id, f"{event.run_id}: 8 ranks are up"
        else:
            note, line = "delivering", f"{event.run_id}: trained, the last rollouts are on their way"
        self._bars.update(self._training, advance=event.kind == "rollout", note=note)
        if not self._console.is_terminal:
            self._console.print(line, highlight=False)

    def dumped(self, count: int) -> None:
        """Show that so many dumps are there."""
        self._bars.update(self._dumps, completed=count)
