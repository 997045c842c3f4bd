"""Signals that wait for what must not be cut in two."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

_HELD = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Have Ctrl-C and SIGTERM wait for the end of the block; for the main thread."""
    came: list[int] = []
    # Not a mask, which is one thread's: another one, such as the progress bar's, would take the signal, and Python
    # would raise it here all the same.
    before = {number: signal.signal(number, lambda which, _frame: came.append(which)) for number in _HELD}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for which in came:
            signal.raise_signal(which)
