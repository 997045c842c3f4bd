"""What aiokafka logs: nothing while we tell a failure ourselves, then in moderation."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_REPEAT_AFTER_S = 60.0
# What follows from a connection that is lost, without saying why.
_CONSEQUENCES = ("Unable to update metadata from %s", "Marking the coordinator dead (node %s)for group %s.")

_client_log = logging.getLogger("aiokafka")


def hide_client_log() -> None:
    """Hides what the client says until a broker has let it in: its refusals are told in one sentence of ours."""
    _client_log.setLevel(logging.CRITICAL)


@asynccontextmanager
async def client_log_shown_after(let_in: asyncio.Event) -> AsyncIterator[None]:
    """Shows warnings and errors of the client, each message once a minute, once a broker has let it in.

    While it has no connection it says so in several ways for each request; each cause is shown, in words of ours.

    Args:
        let_in: tells that; it is waited for while the block runs.
    """
    waiting = asyncio.create_task(_show_after(let_in), name="show-client-log")
    try:
        yield
    finally:
        waiting.cancel()


async def _show_after(let_in: asyncio.Event) -> None:
    await let_in.wait()
    _client_log.setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.addFilter(OncePerMinute())


class OncePerMinute(logging.Filter):
    """Shows a message of aiokafka once a minute: while a broker is down it repeats several in each second."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether the record is shown."""
        if not record.name.startswith("aiokafka"):
            return True
        if (problem := _connection_problem(record)) is not None:
            record.levelno, record.levelname = logging.WARNING, logging.getLevelName(logging.WARNING)
            # Whole, without arguments: the filter of a second handler gets it as it is now.
            record.msg, record.args = f"no connection to Kafka ({problem}); it is tried again", None
        elif _is_consequence(record):
            return False
        # Of the last minute alone: in a daemon that runs for months there may be many addresses, each with its texts.
        self._shown = {text: at for text, at in self._shown.items() if record.created - at < _REPEAT_AFTER_S}
        if record.msg in self._shown:
            return False
        self._shown[record.msg] = record.created
        return True


def _connection_problem(record: logging.LogRecord) -> str | None:
    """Returns why there is no connection, in words, if that is what the client tells."""
    problems = (each for each in _arguments(record) if _is_a(each, "KafkaConnectionError", "OSError"))
    # A broker that answers nothing is a TimeoutError without words.
    return next((str(problem) or type(problem).__name__ for problem in problems), None)


def _is_consequence(record: logging.LogRecord) -> bool:
    return record.msg in _CONSEQUENCES or any(_is_a(each, "NodeNotReadyError") for each in _arguments(record))


def _arguments(record: logging.LogRecord) -> tuple[object, ...]:
    return record.args if isinstance(record.args, tuple) else ()


def _is_a(value: object, *names: str) -> bool:
    # By name: the wire contract alone is installed without the client.
    return any(kind.__name__ in names for kind in type(value).__mro__)
