"""The quota of a spool: is there room for one more rollout, and how long to wait for it."""

import threading
import time
from pathlib import Path

from rollcast.producer.config import PublisherConfig
from rollcast.producer.errors import SpoolFullError
from rollcast.producer.spool.usage import SpoolMeter, SpoolUsage
from rollcast.schemas.sizes import counted

MAX_MARKS = 10_000
"""Marks of dropped rollouts that a spool may hold, some kilobytes each, all runs together."""

_LOOK_EVERY_S = 0.05
# The background thread looks about once a second whether to measure; where it is busy or not there, the thread that
# asks measures, when that is overdue for so long.
_OVERDUE_S = 3.0
# Listing a large spool takes some milliseconds, and it takes the interpreter lock from training.
_PAUSE_PER_WALK = 50


class Quota:
    """Decides whether a spool takes another rollout.

    What the spool holds is measured in the background and remembered, with what was added since, so a publish walks no
    folder, whether there is room or not.

    Args:
        spool: the spool folder, as its path; whatever earlier processes left in it counts.
        config: the limits.
    """

    def __init__(self, spool: Path, config: PublisherConfig) -> None:
        self._spool, self._meter = spool, SpoolMeter(spool)
        self._max_bytes, self._max_bundles = config.max_spool_bytes, config.max_spool_bundles
        self._measuring, self._lock = threading.Lock(), threading.Lock()
        self._added: dict[str, SpoolUsage] = {}
        self._next_walk = 0.0
        self._measure()

    @property
    def held(self) -> SpoolUsage:
        """About what the spool holds: as it was when measured, and what was added since."""
        return self._held

    @property
    def measured_at_ms(self) -> int:
        """Milliseconds since the epoch at which the spool was measured last."""
        return self._measured_at_ms

    @property
    def takes_marks(self) -> bool:
        """Tells whether there is room for the mark of one more dropped rollout."""
        return self._held.marks < MAX_MARKS

    def add(self, key: str, usage: SpoolUsage) -> None:
        """Counts what this rank and its peers are adding, until a measurement finds it.

        Args:
            key: of the rollout, as `SpoolFolder.rollout_key` gives it; of a mark, its path.
            usage: all bundles of it together.
        """
        with self._lock:
            self._held += usage - self._recent(key)
            self._added[key] = usage

    def measure(self) -> None:
        """Measures the spool, unless that was done just now; for a background thread."""
        if time.monotonic() >= self._next_walk:
            self._measure()

    def measure_if_overdue(self) -> None:
        """Measures the spool if nobody has for some seconds; for who asks what it holds."""
        if time.monotonic() > self._next_walk + _OVERDUE_S:
            self._measure()

    def await_room(self, size: int, shards: int, key: str, wait_s: float) -> None:
        """Returns when there is room for a rollout's bundles; at once where there is.

        Args:
            size: of one bundle.
            shards: number of bundles that the writers of this spool are about to add; all about that size.
            key: of the rollout; peers may have begun its bundles, which takes no room from them.
            wait_s: longest wait; what is larger than the whole quota is not waited for.

        Raises:
            SpoolFullError: there was none within the bound.
        """
        need = SpoolUsage(shards * size, shards)
        if self._fits(self._held, need):
            return
        deadline = time.monotonic() + (wait_s if self._fits(SpoolUsage(), need) else 0.0)
        self.measure_if_overdue()
        while not self._fits(held := self._held_besides(key), need):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise SpoolFullError(
                    f"the spool {self._spool} holds {counted(held.bundles, 'bundle')} with {held.size} bytes and the "
                    f"rollout needs {need.bundles} with {need.size}: max_spool_bundles is {self._max_bundles}, "
                    f"max_spool_bytes {self._max_bytes}; is Kafka reachable?"
                )
            # Looking, not waiting on a primitive: another process empties the spool.
            time.sleep(min(_LOOK_EVERY_S, left_s))
            self._measure()

    def _measure(self) -> None:
        if not self._measuring.acquire(timeout=_LOOK_EVERY_S):
            # Another thread is at it.
            return
        try:
            started = time.monotonic()
            with self._lock:
                found_by_then = [*self._added]
            measured = self._meter.measure()
            with self._lock:
                for key in found_by_then:
                    del self._added[key]
                self._measured, self._measured_at_ms = measured, time.time_ns() // 1_000_000
                # What was added meanwhile may have been found or not, or the bundles of some peers only.
                self._held = measured.usage
                for key, usage in self._added.items():
                    self._held += usage - self._recent(key)
            ended = time.monotonic()
            self._next_walk = ended + _PAUSE_PER_WALK * (ended - started)
        finally:
            self._measuring.release()

    def _held_besides(self, key: str) -> SpoolUsage:
        with self._lock:
            return self._held - self._recent(key)

    def _recent(self, key: str) -> SpoolUsage:
        return self._measured.recent.get(key, SpoolUsage())

    def _fits(self, held: SpoolUsage, need: SpoolUsage) -> bool:
        return held.size + need.size <= self._max_bytes and held.bundles + need.bundles <= self._max_bundles
