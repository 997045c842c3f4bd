"""Spools that share a process take turns where a bundle may end it."""

import asyncio
from collections.abc import Callable
from pathlib import Path


class Turns:
    """Keeps a bundle at which shippers have died alone in its process: should that happen again, no other looks guilty.

    Bundles without such deaths go side by side, and first; the others one by one, those with the fewest deaths first,
    so that a deadly bundle in one spool does not keep the others waiting until it is set aside.
    """

    def __init__(self) -> None:
        # Deaths at the bundle that each spool has on its way, or wants to have; of a spool that has just come: 0.
        self._deaths: dict[Path, int] = {}
        self._alone: Path | None = None
        self._changed = asyncio.Event()

    def join(self, spool: Path) -> None:
        """Adds a spool that has not been looked at: what it has may have to go before the suspects of others."""
        self._deaths[spool] = 0

    async def take(self, spool: Path, deaths: int) -> None:
        """Returns when the next bundle of a spool may be on its way.

        Args:
            spool: whose bundle it is; nothing else of it is on its way if shippers died at this bundle or the last one.
            deaths: how many shippers have died at the bundle.
        """
        self.end(spool)
        self._deaths[spool] = deaths
        if deaths == 0:
            await self._until(lambda: self._alone is None)
        else:
            # Bundles that go side by side have no deaths, so to be first means that there are none.
            await self._until(lambda: self._alone is None and spool == min(self._deaths, key=self._deaths.__getitem__))
            self._alone = spool

    def end(self, spool: Path) -> None:
        """Ends a spool's turn, if it has or wants one: nothing of it that could end the process is on its way."""
        self._deaths.pop(spool, None)
        if self._alone == spool:
            self._alone = None
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await self._changed.wait()
