"""Errors of the demo; each says what happened, where, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar


class DemoError(Exception):
    """Root of the demo's errors."""

    retriable: ClassVar[bool] = False


class ProcessFailedError(DemoError):
    """A child process ended that should have gone on, or ended badly.

    Args:
        name: What the process is, such as `rank 3`.
        exit_status: Its exit status; negative is a signal, None says that it does not end.
        log_path: Its log, of which the last lines are in the message.
    """

    def __init__(self, *, name: str, exit_status: int | None, log_path: Path) -> None:
        self.name = name
        self.exit_status = exit_status
        self.log_path = log_path
        super().__init__(
            f"{name} ended with status {exit_status}; see {log_path}, which ends with:\n{log_tail(log_path)}"
        )


class DeadlineExceededError(DemoError):
    """Something took longer than its bound."""

    retriable: ClassVar[bool] = True

    def __init__(self, *, what: str, timeout_s: float, remedy: str) -> None:
        super().__init__(f"{what} took more than {timeout_s:.0f} s; {remedy}")


def log_tail(path: Path, *, lines: int = 25) -> str:
    """Return the last lines of a log, or a note when there is none."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return "(no log)"
    return "\n".join(f"    {line}" for line in text.splitlines()[-lines:]) or "    (empty log)"
