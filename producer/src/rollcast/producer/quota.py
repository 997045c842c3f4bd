"""The quota of a spool: is there room for one more rollout, and how long to wait for it."""

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
    """Decides whether a spool takes another rollout.

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

    def held(self) -> SpoolUsage:
        """Returns about what the spool holds."""
        with self._lock:
            return SpoolUsage(self._measured.size + self._added.size, self._measured.bundles + self._added.bundles)

    def add(self, size: int, shards: int) -> None:
        """Counts a bundle, and as many as its peers are adding, until the next measurement finds them."""
        with self._lock:
            self._added = SpoolUsage(self._added.size + shards * size, self._added.bundles + shards)

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

    def await_room(self, size: int, shards: int, unfinished: str, wait_s: float) -> None:
        """Returns when there is room for a rollout's bundles; at once where there is.

        Args:
            size: of one bundle.
            shards: number of bundles that the writers of this spool are about to add; all about that size.
            unfinished: how the paths of these bundles begin; peers may have begun them, which takes no room from them.
            wait_s: longest wait; what is larger than the whole quota is not waited for.

        Raises:
            SpoolFullError: there was none within the bound.
        """
        need = SpoolUsage(shards * size, shards)
        if self._fits(self.held(), need):
            return
        deadline = time.monotonic() + (wait_s if self._fits(SpoolUsage(), need) else 0.0)
        while not self._fits(held := measure_spool(self._spool, unfinished), need):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise SpoolFullError(
                    f"the spool {self._spool} holds {held.bundles} bundles with {held.size} bytes and the rollout "
                    f"needs {need.bundles} with {need.size}: max_spool_bundles is {self._max_bundles}, "
                    f"max_spool_bytes {self._max_bytes}; is Kafka reachable?"
                )
            # Looking, not waiting on a primitive: another process empties the spool.
            time.sleep(min(_LOOK_EVERY_S, left_s))

    def _fits(self, held: SpoolUsage, need: SpoolUsage) -> bool:
        return held.size + need.size <= self._max_bytes and held.bundles + need.bundles <= self._max_bundles
