"""Notices a Kafka client that has stopped bringing records."""

import asyncio
import logging
from typing import Protocol

from rollcast.consumer.retry import Retry

_LONGEST_LOOK_S = 5.0
# Elections and rebalances take a few seconds.
_SILENT_S = 10.0

_log = logging.getLogger("rollcast.consumer")


class ClientStalledError(Exception):
    """The Kafka client brings nothing, though there is something to read, or it cannot even tell."""


class Watched(Protocol):
    """What the watchdog looks at; the group member, or a stand-in whose lag a test sets."""

    waiting_since: float | None
    """Loop time since when it has waited for records in vain; None while it is busy with some."""

    async def lag(self) -> int | None:
        """Returns how many offsets it has not read; None if that cannot be told."""
        ...


class Watchdog:
    """Tells a stalled client from an idle one and from one whose records wait for the disk.

    Attributes:
        lag: offsets not read, as last seen; None if that cannot be told.
        progressed_at: loop time of the last look at which records came or nothing was left to read.

    Args:
        stall_after_s: how long a client may wait in vain.
        retry: ends the watch when the daemon stops.
        now: loop time.
    """

    def __init__(self, stall_after_s: float, retry: Retry, now: float) -> None:
        self._stall_after_s, self._retry = stall_after_s, retry
        self.lag: int | None = None
        self.progressed_at = self._answered_at = now
        self._silence_is_told = False

    @property
    def stalled_s(self) -> float | None:
        """How long records have been waited for that are known to be there; None if not for too long."""
        waited_s = asyncio.get_running_loop().time() - self.progressed_at
        return waited_s if self.lag and waited_s >= self._stall_after_s else None

    @property
    def silent_s(self) -> float:
        """How long Kafka has not said how much there is to read."""
        return 0.0 if self.lag is not None else asyncio.get_running_loop().time() - self._answered_at

    async def watch(self, member: Watched) -> None:
        """Returns when the daemon stops.

        Raises:
            ClientStalledError: the member should get a new client.
        """
        clock = asyncio.get_running_loop().time
        since = clock()
        while True:
            await self._retry.pause(min(_LONGEST_LOOK_S, self._stall_after_s / 4))
            if self._retry.stopping:
                return
            self.lag = await member.lag()
            self._note_answer(clock())
            waiting_since = member.waiting_since
            if waiting_since is None or self.lag == 0:
                since = self.progressed_at = clock()
            elif waiting_since > since:
                since = self.progressed_at = waiting_since
            elif clock() - since >= self._stall_after_s:
                left = "an unknown number of" if self.lag is None else self.lag
                raise ClientStalledError(f"no record came for {clock() - since:.0f} s, with {left} to read")

    def _note_answer(self, now: float) -> None:
        if self.lag is not None:
            self._answered_at = now
            if self._silence_is_told:
                _log.info("Kafka answers again")
            self._silence_is_told = False
        elif not self._silence_is_told and self.silent_s >= _SILENT_S:
            _log.warning(
                "Kafka does not answer: for %.0f s it has not said how much there is to read; nothing is lost, it is "
                "asked again",
                self.silent_s,
            )
            self._silence_is_told = True
