"""What aiokafka logs: nothing while we tell a failure ourselves, then in moderation."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_REPEAT_AFTER_S = 60.0

_client_log = logging.getLogger("aiokafka")


def hide_client_log() -> None:
    """Hides what the client says until a broker has let it in: its refusals are told in one sentence of ours."""
    _client_log.setLevel(logging.CRITICAL)


@asynccontextmanager
async def client_log_shown_after(let_in: asyncio.Event) -> AsyncIterator[None]:
    """Shows warnings and errors of the client, each message once a minute, once a broker has let it in.

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
        last = self._shown.get(record.msg)
        if last is not None and record.created - last < _REPEAT_AFTER_S:
            return False
        self._shown[record.msg] = record.created
        return True
