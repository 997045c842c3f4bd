"""What a shipper has done so far."""

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class ShipperStats:
    """Counters of one spool since this process started; written by the event loop, read by anyone.

    Attributes:
        shipped_bundles: bundles with content that Kafka has acknowledged whole.
        shipped_bytes: raw size of their tensors.
        shipped_marks: marks of dropped rollouts that Kafka has acknowledged.
        records: records handed to the client, repeats included.
        wire_bytes: their size.
        resent_bundles: bundles that had to be sent again.
        set_aside_bundles: bundles that cannot be shipped.
        kafka_errors: times that Kafka was given up for a pause, and a new client made.
        trouble: what keeps bundles from being shipped now; None: nothing.
        is_refused: the trouble is that Kafka answers and refuses this shipper.
    """

    shipped_bundles: int = 0
    shipped_bytes: int = 0
    shipped_marks: int = 0
    records: int = 0
    wire_bytes: int = 0
    resent_bundles: int = 0
    set_aside_bundles: int = 0
    kafka_errors: int = 0
    trouble: str | None = None
    is_refused: bool = False
    _progress_at: float = field(default_factory=time.monotonic)

    @property
    def bundles(self) -> int:
        """Bundles that have left the spool, marks included."""
        return self.shipped_bundles + self.shipped_marks + self.set_aside_bundles

    def progressed(self) -> None:
        """Notes that a record was acknowledged, or that nothing is there to ship."""
        self._progress_at = time.monotonic()
        self.trouble, self.is_refused = None, False

    @property
    def seconds_since_progress(self) -> float:
        """Seconds since `progressed`; they grow only while something waits and Kafka takes nothing."""
        return time.monotonic() - self._progress_at
