"""What a command shows of its log, on stderr, so that nothing is repeated without end."""

import logging
from collections.abc import Callable, Hashable

_REMEMBERED = 10_000


class _Once(logging.Filter):
    """Lets each line through that has no key, and of those that have one the first.

    Args:
        key: of a line; None where it has none.
    """

    def __init__(self, key: Callable[[logging.LogRecord], Hashable | None]) -> None:
        super().__init__()
        self._key = key
        self._seen: set[Hashable] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Tells whether the line is let through."""
        key = self._key(record)
        if key is None:
            return True
        is_new = key not in self._seen
        if len(self._seen) < _REMEMBERED:
            self._seen.add(key)
        return is_new


def log_of_a_daemon() -> logging.Handler:
    """Returns the handler for the log of a command that runs for months."""
    handler = logging.StreamHandler()
    # A line that is marked with `once_for`, such as a run, comes with every rollout of it.
    handler.addFilter(_Once(_marked))
    return handler


def show_warnings() -> None:
    """Shows warnings and errors, each once."""
    handler = log_of_a_daemon()
    # One bad manifest is met again with every dump beside it, one bad record twice.
    handler.addFilter(_Once(_shown))
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", handlers=[handler])


def _marked(record: logging.LogRecord) -> Hashable | None:
    once_for = getattr(record, "once_for", None)
    return None if once_for is None else (str(record.msg), once_for)


def _shown(record: logging.LogRecord) -> Hashable:
    return record.levelname, record.name, record.getMessage()
