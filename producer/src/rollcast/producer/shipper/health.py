"""What the shipper says of itself: whether it lives, and whether it does its work."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from rollcast.producer.shipper.stats import ShipperStats
from rollcast.producer.shipper.topic import RecordsTopic
from rollcast.producer.spool.folder import SpoolFolder

_LOOP_TIMEOUT_S = 5.0


class Health:
    """Answers from the shipper's own state, to any thread but its event loop's; empty means that all is well.

    Args:
        topic: knows whether Kafka has let this process in.
        spools: those that are being shipped; may grow.
        awaited: those that are not, each with the reason in words; may change.
        loop: in which the shippers run.
        loop_timeout_s: it hangs when it does not answer for so long.
    """

    def __init__(
        self,
        topic: RecordsTopic,
        spools: Sequence[tuple[SpoolFolder, ShipperStats]],
        awaited: Mapping[Path, str],
        loop: asyncio.AbstractEventLoop,
        loop_timeout_s: float = _LOOP_TIMEOUT_S,
    ) -> None:
        self._topic, self._spools, self._awaited = topic, spools, awaited
        self._loop, self._loop_timeout_s = loop, loop_timeout_s

    def live_problems(self) -> list[str]:
        """Returns why a restart might help: settings that Kafka refuses are read anew, and what hangs ends."""
        answer = Future[None]()
        self._loop.call_soon_threadsafe(answer.set_result, None)
        try:
            answer.result(self._loop_timeout_s)
        except TimeoutError:
            return [f"it has done nothing for {self._loop_timeout_s:g} s"]
        return [stats.trouble for _, stats in self._spools if stats.is_refused and stats.trouble]

    def ready_problems(self) -> list[str]:
        """Returns why no bundle is to be expected in Kafka now."""
        problems = [f"{spool.path}: {stats.trouble}" for spool, stats in self._spools if stats.trouble]
        if (absence := self._topic.absence) is not None:
            problems.append(absence)
        return problems

    def awaited_spools(self) -> list[str]:
        """Returns which spools are waited for, and why; it is ready all the same: they may come with their trainers."""
        return [f"{trouble}; it is waited for" for trouble in list(self._awaited.values())]
