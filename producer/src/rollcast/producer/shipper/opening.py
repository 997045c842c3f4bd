"""A bundle is claimed and read while the one before it is sent."""

import asyncio
import logging
from pathlib import Path

from rollcast.producer.errors import UnusableBundleError
from rollcast.producer.shipper.claims import MAX_DEATHS, Claims
from rollcast.producer.spool.read import Bundle, read_bundle, read_closing_event

_log = logging.getLogger("rollcast.ship")


class Opening:
    """Opens the bundles of a spool in the order in which they are sent, one of them ahead.

    Reading its records takes a twentieth of the time of sending it, and processors would idle meanwhile. Nothing is
    opened ahead of or beside a bundle at which a shipper has died: should that happen again, no other bundle must look
    guilty.

    Args:
        claims: get those that are opened.
    """

    def __init__(self, claims: Claims) -> None:
        self._claims = claims
        self._ahead: tuple[Path, asyncio.Task[Bundle | None]] | None = None

    def is_ahead(self, path: Path) -> bool:
        """Returns whether a bundle that comes next has been opened ahead: it is on its way already."""
        return self._ahead is not None and self._ahead[0] == path

    def deaths(self, path: Path) -> int:
        """Returns how many shippers have died at a bundle that comes next; if any has, it must be on its way alone."""
        return 0 if self.is_ahead(path) else self._claims.deaths(path)

    async def open(self, path: Path, following: Path | None) -> Bundle | None:
        """Returns a bundle, claimed, or None if it is on its way with another shipper; begins to open the next one.

        Raises:
            UnusableBundleError: no shipper survives it, or its tensors are missing or not written by this program.
            SpoolError: its records are damaged.
            OSError: the machine is in trouble, or the bundle has gone.
        """
        is_suspect = self.deaths(path) > 0
        if self._ahead is None or self._ahead[0] != path:
            self._ahead = path, self._begin(path)
        opened = self._ahead[1]
        await asyncio.wait({opened})
        if following is None or is_suspect or self._claims.deaths(following):
            self._ahead = None
        else:
            self._ahead = following, self._begin(following)
        return opened.result()

    async def end(self) -> None:
        """Returns when nothing is being opened any more; what is claimed by then stays so."""
        if self._ahead is not None:
            # Not cancelled: its thread would go on, and claim the bundle for nobody.
            await asyncio.wait({self._ahead[1]})
            self._ahead[1].exception()

    def _begin(self, path: Path) -> asyncio.Task[Bundle | None]:
        return asyncio.create_task(self._open(path), name=f"open-{path.name}")

    async def _open(self, path: Path) -> Bundle | None:
        deaths = self._claims.deaths(path)
        if not await asyncio.to_thread(self._claims.take, path):
            _log.info("bundle %s is on its way with another shipper", path)
            return None
        if deaths >= MAX_DEATHS:
            # Only once: it may be what they died of.
            shard = await asyncio.to_thread(read_closing_event, path) if deaths == MAX_DEATHS else None
            raise UnusableBundleError(f"{deaths} shippers died while it was on its way", shard)
        return await asyncio.to_thread(read_bundle, path)
