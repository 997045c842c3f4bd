"""What a log says of a shipper's work: once a minute, and at its end."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rollcast.producer.shipper.stats import ShipperStats
from rollcast.producer.spool.folder import SpoolFolder
from rollcast.producer.spool.usage import bundles_in_words, counted_bundles
from rollcast.schemas.sizes import size_in_words

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
        last, told_at = Counter[str](), self._started_at
        while True:
            await asyncio.sleep(self._every_s)
            totals, now = self._totals(), time.monotonic()
            shipped = totals - last
            if shipped["bundles"] or shipped["marks"]:
                waiting = await asyncio.to_thread(self._waiting)
                _log.info("shipped: %s; waiting: %s", _line(shipped, now - told_at), waiting)
            last, told_at = totals, now

    def _totals(self) -> Counter[str]:
        stats = [stats for _, stats in self._spools]
        return Counter(
            bundles=sum(each.shipped_bundles for each in stats),
            marks=sum(each.shipped_marks for each in stats),
            size=sum(each.shipped_bytes for each in stats),
            wire=sum(each.wire_bytes for each in stats),
        )

    def _waiting(self) -> str:
        try:
            return bundles_in_words([path for spool, _ in self._spools for _, path in spool.bundles()])
        except OSError:
            return "an unknown number of bundles"


def _line(shipped: Counter[str], seconds: float) -> str:
    what = counted_bundles(shipped["bundles"], shipped["marks"])
    size, wire = size_in_words(shipped["size"]), size_in_words(shipped["wire"])
    return f"{what} of {size}, as {wire} on the wire, {size_in_words(shipped['size'] / max(seconds, 1e-3))}/s"
