"""The quota of a spool: is there room for one more bundle, and how long to wait for it."""

import threading
import time
from pathlib import Path

from rollcast.producer.config import PublisherConfig
from rollcast.producer.errors import SpoolFullError
from rollcast.producer.spool.usage import SpoolUsage, measure_spool

_LOOK_EVERY_S = 0.05
# Walking a large spool takes a while, and it takes the interpreter lock from training.
_PAUSE_PER_WALK = 20


class Quota:
    """Decides whether a spool takes another bundle.

    What the spool holds is measured in the background and remembered, so that a publish into a spool with room walks
    no folder. Only a spool that seems full is measured by the training thread, which then may wait for the shipper.

    Args:
        spool: the spool folder, as its path; whatever earlier processes left in it counts.
        config: the limits.
    """

    def __init__(self, spool: Path, config: PublisherConfig) -> None:
        self._spool = spool
        self._max_bytes, self._max_bundles = config.max_spool_bytes, config.max_spool_bundles
        self._lock = threading.Lock()
        self._measured = measure_spool(spool)
        self._added = SpoolUsage()
        self._next_walk = 0.0

    @property
    def held(self) -> SpoolUsage:
        """About what the spool holds."""
        with self._lock:
            return SpoolUsage(self._measured.size + self._added.size, self._measured.bundles + self._added.bundles)

    def add(self, size: int) -> None:
        """Counts a bundle of this process until the next measurement finds it."""
        with self._lock:
            self._added = SpoolUsage(self._added.size + size, self._added.bundles + 1)

    def measure(self) -> None:
        """Measures the spool, unless that was done just now; for a background thread."""
        started = time.monotonic()
        if started < self._next_walk:
            return
        with self._lock:
            added = self._added
        measured = measure_spool(self._spool)
        with self._lock:
            self._measured = measured
            # What was added meanwhile may have been found or not: it is counted once too often rather than not at all.
            self._added = SpoolUsage(self._added.size - added.size, self._added.bundles - added.bundles)
        ended = time.monotonic()
        self._next_walk = ended + _PAUSE_PER_WALK * (ended - started)

    def await_room(self, size: int, own: Path, wait_s: float) -> None:
        """Returns when there is room for a bundle; at once where there is.

        Args:
            size: of the bundle.
            own: where it will be filled; a peer may have begun already, which takes no room from this one.
            wait_s: longest wait; a bundle larger than the whole quota is not waited for.

        Raises:
            SpoolFullError: there was none within the bound.
        """
        if self._fits(self.held, size):
            return
        deadline = time.monotonic() + (wait_s if size <= self._max_bytes else 0.0)
        while not self._fits(held := measure_spool(self._spool, besides=own), size):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise SpoolFullError(
                    f"the spool {self._spool} holds {held.bundles} bundles with {held.size} bytes and the shard has "
                    f"{size}: max_spool_bundles is {self._max_bundles}, max_spool_bytes {self._max_bytes}; "
                    "is Kafka reachable?"
                )
            # Looking, not waiting on a primitive: another process empties the spool.
            time.sleep(min(_LOOK_EVERY_S, left_s))

    def _fits(self, held: SpoolUsage, size: int) -> bool:
        return held.size + size <= self._max_bytes and held.bundles < self._max_bundles
