"""What a command shows of its log, on stderr, so that nothing is repeated without end."""

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


class OnceForEach(logging.Filter):
    """Lets what is marked with `once_for`, such as a run, through once for each value: it comes with every rollout."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[tuple[str, str]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Tells whether the line is not marked, or is the first of its kind for what it is marked with."""
        once_for = getattr(record, "once_for", None)
        if once_for is None:
            return True
        kind = (str(record.msg), once_for)
        is_new = kind not in self._seen
        if len(self._seen) < _REMEMBERED:
            self._seen.add(kind)
        return is_new


def log_of_a_daemon() -> logging.Handler:
    """Returns the handler for the log of a command that runs for months."""
    handler = logging.StreamHandler()
    handler.addFilter(OnceForEach())
    return handler


def show_warnings() -> None:
    """Shows warnings and errors, each once."""
    handler = logging.StreamHandler()
    handler.addFilter(OnceForEach())
    handler.addFilter(Once())
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", handlers=[handler])
