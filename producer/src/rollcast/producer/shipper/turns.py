"""Spools that share a process take turns where a bundle may end it."""

import asyncio
from pathlib import Path

from rollcast.producer.shipper.claims import FORGIVEN_DEATHS

_LAST_WAITS_S = 60.0


class Turns:
    """Keeps a bundle at which shippers have died alone in its process: should that happen again, no other looks guilty.

    Bundles without such deaths go side by side. One with a few is next, for they may have come from outside; one with
    more is last, so that a deadly bundle in one spool does not keep the others waiting until it is set aside; but it
    becomes next after a minute, for its own spool waits with it, and the others may never be done.
    """

    def __init__(self) -> None:
        # Of each spool that has bundles, or may have: deaths at the next one, or at the one that is on its way.
        self._deaths: dict[Path, int] = {}
        self._going: set[Path] = set()
        self._changed = asyncio.Event()

    def join(self, spool: Path) -> None:
        """Adds a spool that nobody has looked into: what it has goes before the bundles that are last."""
        self._deaths[spool] = 0

    @property
    def are_asked_for(self) -> bool:
        """Whether a bundle with a few deaths waits until nothing else is on its way."""
        return any(self._is_next(spool) for spool in self._deaths)

    async def take(self, spool: Path, deaths: int) -> None:
        """Returns when the next bundle of a spool may be on its way; its last one can end the process no more.

        Args:
            spool: whose bundle it is.
            deaths: how many shippers have died at the bundle.
        """
        self._going.discard(spool)
        self._deaths[spool] = deaths
        self._tell()
        try:
            async with asyncio.timeout(_LAST_WAITS_S):
                await self._may_go_now(spool)
        except TimeoutError:
            self._deaths[spool] = min(deaths, FORGIVEN_DEATHS)
            self._tell()
            await self._may_go_now(spool)
        self._going.add(spool)

    def end(self, spool: Path) -> None:
        """Notes that a spool has no bundle any more that could end the process, or gives up."""
        self._going.discard(spool)
        self._deaths.pop(spool, None)
        self._tell()

    async def _may_go_now(self, spool: Path) -> None:
        while not self._may_go(spool):
            await self._changed.wait()

    def _may_go(self, spool: Path) -> bool:
        deaths = self._deaths[spool]
        others = self._deaths.keys() - {spool}
        if deaths == 0:
            return not any(self._is_next(other) or (other in self._going and self._deaths[other]) for other in others)
        is_last = deaths > FORGIVEN_DEATHS
        is_behind = any(self._deaths[other] < deaths and (is_last or self._deaths[other]) for other in others)
        return not self._going and not is_behind

    def _is_next(self, spool: Path) -> bool:
        return spool not in self._going and 0 < self._deaths[spool] <= FORGIVEN_DEATHS

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
