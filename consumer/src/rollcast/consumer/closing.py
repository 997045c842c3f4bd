"""Closes connections within a bound, whatever the other side does."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

CLOSE_TIMEOUT_S = 5.0

_log = logging.getLogger("rollcast.consumer")


class Closing:
    """Closes clients; one that takes longer than `CLOSE_TIMEOUT_S` goes on in the background until `give_up`."""

    def __init__(self) -> None:
        self._late: dict[asyncio.Task[None], str] = {}

    async def close(self, closers: Mapping[str, Callable[[], Coroutine[Any, Any, None]]]) -> None:
        """Closes all of them at once, by name."""
        # Tasks of their own: with the brokers away aiokafka lets its own CancelledError through, which is not ours.
        closing = {asyncio.create_task(_in_order(name, close())): name for name, close in closers.items()}
        if not closing:
            return
        _, late = await asyncio.wait(closing, timeout=CLOSE_TIMEOUT_S)
        for task in late:
            _log.warning("the %s could not be closed within %g s", closing[task], CLOSE_TIMEOUT_S)
            self._late[task] = closing[task]

    async def give_up(self) -> None:
        """Cancels what has still not closed."""
        for task in self._late:
            task.cancel()
        if self._late:
            await asyncio.wait(self._late, timeout=CLOSE_TIMEOUT_S)


async def _in_order(name: str, closing: Awaitable[None]) -> None:
    try:
        await closing
    except asyncio.CancelledError:
        _log.warning("the %s could not be closed in order: cancelled", name)
    except Exception as exc:  # noqa: BLE001 - whatever a client says at its end, the next one is to be closed too
        _log.warning("the %s could not be closed in order: %r", name, exc)
