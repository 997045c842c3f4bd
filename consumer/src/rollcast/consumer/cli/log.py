"""Warnings of a command that ends, on stderr."""

import logging

_REMEMBERED = 10_000


class Once(logging.Filter):
    """Lets each line through once: one bad manifest is met again with every dump beside it, one bad record twice."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Tells whether the line is new."""
        line = f"{record.levelname} {record.name} {record.getMessage()}"
        is_new = line not in self._seen
        if len(self._seen) < _REMEMBERED:
            self._seen.add(line)
        return is_new


def show_warnings() -> None:
    """Shows warnings and errors, each once."""
    handler = logging.StreamHandler()
    handler.addFilter(Once())
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", handlers=[handler])
