"""What a log says of a shipper's work: once a minute, and at its end."""

import asyncio
import logging
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rollcast.producer.shipper.stats import ShipperStats
from rollcast.producer.spool.folder import SpoolFolder

_EVERY_S = 60.0

_log = logging.getLogger("rollcast.ship")


class Summary:
    """Logs what was shipped each minute in which something was, and in all when the context ends.

    Args:
        spools: those that are being shipped; may grow.
    """

    def __init__(self, spools: Sequence[tuple[SpoolFolder, ShipperStats]], every_s: float = _EVERY_S) -> None:
        self._spools, self._every_s = spools, every_s

    def __enter__(self) -> Self:
        """Begins; needs a running event loop."""
        self._started_at = time.monotonic()
        self._task = asyncio.create_task(self._tell(), name="summary")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends."""
        self._task.cancel()
        _log.info("shipped in all: %s", _line(self._totals(), time.monotonic() - self._started_at))

    async def _tell(self) -> None:
        last, told_at = (0, 0, 0), self._started_at
        while True:
            await asyncio.sleep(self._every_s)
            totals, now = self._totals(), time.monotonic()
            if totals[0] > last[0]:
                waiting = await asyncio.to_thread(self._waiting)
                shipped = (totals[0] - last[0], totals[1] - last[1], totals[2] - last[2])
                _log.info("shipped: %s; %s wait", _line(shipped, now - told_at), waiting)
            last, told_at = totals, now

    def _totals(self) -> tuple[int, int, int]:
        stats = [stats for _, stats in self._spools]
        return (
            sum(each.shipped_bundles for each in stats),
            sum(each.shipped_bytes for each in stats),
            sum(each.wire_bytes for each in stats),
        )

    def _waiting(self) -> str:
        try:
            return str(sum(len(spool.bundles()) for spool, _ in self._spools))
        except OSError:
            return "an unknown number"


def _line(shipped: tuple[int, int, int], seconds: float) -> str:
    bundles, size, wire = shipped
    rate = size / 1e6 / max(seconds, 1e-3)
    return f"{bundles} bundles of {size / 1e6:.1f} MB, as {wire / 1e6:.1f} MB on the wire, {rate:.1f} MB/s"
