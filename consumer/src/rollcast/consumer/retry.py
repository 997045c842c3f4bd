"""Tries again what can succeed later, until the daemon stops."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from aiokafka.errors import KafkaError

from rollcast.consumer.brief import brief
from rollcast.consumer.errors import ConsumeError
from rollcast.consumer.stats import Stats

_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0

_log = logging.getLogger("rollcast.consumer")
_T = TypeVar("_T")


class StoppingError(Exception):
    """The daemon stops, and the last try failed; the work is left to whoever reads the records next."""


class Retry:
    """Waits and tries that end when `stopping` is set.

    Attributes:
        failing: what failed at the last try and is tried again, with the problem.

    Args:
        stopping: set when the daemon stops.
        stats: its `retries` are counted.
    """

    def __init__(self, stopping: asyncio.Event, stats: Stats) -> None:
        self._stopping, self._stats = stopping, stats
        self.failing: dict[str, str] = {}

    @property
    def stopping(self) -> bool:
        """Whether the daemon stops."""
        return self._stopping.is_set()

    async def pause(self, seconds: float) -> None:
        """Returns after that time, or when the daemon stops."""
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass

    async def wait_for(self, event: asyncio.Event) -> None:
        """Returns when the event is set or the daemon stops."""
        if event.is_set() or self._stopping.is_set():
            return
        waits = {asyncio.create_task(each.wait()) for each in (event, self._stopping)}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def unless_stopping(self, work: Coroutine[Any, Any, None]) -> bool:
        """Returns whether the work was done before the daemon was told to stop; if not, it is cancelled."""
        doing, stopping = asyncio.create_task(work), asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({doing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                doing.result()
            return doing.done()
        except StoppingError:
            return False
        finally:
            for task in (doing, stopping):
                task.cancel()
            await asyncio.wait({doing, stopping})

    async def until_done(self, what: str, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """Returns the result of the first try that succeeds; each failure is logged and counted.

        Raises:
            StoppingError: a try failed and the daemon stops.
            ConsumeError: Kafka refused for good.
        """
        delay_s = _FIRST_DELAY_S
        try:
            while True:
                try:
                    return await attempt()
                except (OSError, KafkaError) as exc:
                    if isinstance(exc, KafkaError) and not exc.retriable:
                        raise ConsumeError(f"Kafka refused to {what}: {exc!r}; correct that and start again") from exc
                    self._stats.retries += 1
                    if self._stopping.is_set():
                        raise StoppingError(what) from exc
                    problem = self.failing[what] = brief(exc)
                    _log.warning(
                        "could not %s: %s; next try in %g s, no offset moves until then", what, problem, delay_s
                    )
                await self.pause(delay_s)
                delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
        finally:
            self.failing.pop(what, None)
