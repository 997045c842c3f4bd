"""What Prometheus sees of the shipper, and of the publishers beside it."""

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollcast.producer.shipper.publisher_stats import WriterStats, read_publisher_stats, utf8
from rollcast.producer.shipper.stats import ShipperStats
from rollcast.producer.spool.folder import SpoolFolder, is_folder
from rollcast.producer.spool.usage import SpoolMeter

_SHIPPER_COUNTERS = {
    "shipped_bundles": "Bundles with content that Kafka has acknowledged whole.",
    "shipped_bytes": "Raw size of their tensors.",
    "shipped_marks": "Marks of dropped rollouts that Kafka has acknowledged.",
    "records": "Records handed to Kafka, repeats included.",
    "wire_bytes": "Size of these records.",
    "resent_bundles": "Bundles that had to be sent again.",
    "set_aside_bundles": "Bundles that cannot be shipped; see .poison in the spool.",
    "kafka_errors": "Times that Kafka was given up for a pause.",
}
_PUBLISHER_COUNTERS = {
    "published": "Rollouts that are whole in the spool.",
    "dropped": "Rollouts dropped, for any reason.",
    "bytes": "Raw size of what was published.",
    "stall_seconds": "Time that training has spent in publish.",
}


def registry_of(folders: Sequence[Path], shipping: Sequence[tuple[SpoolFolder, ShipperStats]]) -> CollectorRegistry:
    """Returns the metrics of these spools.

    Args:
        folders: all of them, also those that are not there yet.
        shipping: those that are being shipped; may grow.
    """
    registry = CollectorRegistry()
    registry.register(_SpoolCollector(folders, shipping))
    return registry


class _SpoolCollector(Collector):
    """Looks everything up when it is asked; series are bounded by the number of spools and of their writers.

    It is asked by threads of the HTTP server, never in the event loop.
    """

    def __init__(self, folders: Sequence[Path], shipping: Sequence[tuple[SpoolFolder, ShipperStats]]) -> None:
        self._shipping = shipping
        # They remember what they have looked into: ten thousand bundles would cost half a second each time.
        self._meters = {folder: SpoolMeter(folder) for folder in folders}
        self._lock = threading.Lock()

    def describe(self) -> list[Metric]:
        # Else the registry would collect already when it is told of this collector.
        return []

    def collect(self) -> Iterator[Metric]:
        shipping = {spool.path: stats for spool, stats in self._shipping}
        # All zero where nothing is shipped yet: a series that comes with its first count hides that from a rate().
        spools = [(utf8(str(folder)), folder, shipping.get(folder) or ShipperStats()) for folder in self._meters]
        for name, words in _SHIPPER_COUNTERS.items():
            counter = CounterMetricFamily(f"rollcast_ship_{name}", words, labels=["spool"])
            for path, _, stats in spools:
                counter.add_metric([path], getattr(stats, name))
            yield counter
        progress = GaugeMetricFamily(
            "rollcast_ship_seconds_since_progress",
            "Seconds for which bundles have waited without any being acknowledged.",
            labels=["spool"],
        )
        refused = GaugeMetricFamily(
            "rollcast_ship_refused", "1 while Kafka answers and refuses this shipper.", labels=["spool"]
        )
        present = GaugeMetricFamily(
            "rollcast_spool_present", "1 while the spool is there and can be read.", labels=["spool"]
        )
        depth = GaugeMetricFamily("rollcast_spool_bundles", "Bundles with content that wait.", labels=["spool"])
        marks = GaugeMetricFamily("rollcast_spool_marks", "Marks of dropped rollouts that wait.", labels=["spool"])
        size = GaugeMetricFamily("rollcast_spool_bytes", "Their size, unfinished ones included.", labels=["spool"])
        writers: list[tuple[str, WriterStats]] = []
        for path, folder, stats in spools:
            progress.add_metric([path], stats.seconds_since_progress)
            refused.add_metric([path], int(stats.is_refused))
            present.add_metric([path], int(is_folder(folder) and os.access(folder, os.R_OK | os.X_OK)))
            with self._lock:
                found = self._meters[folder].measure()
            depth.add_metric([path], found.committed - found.usage.marks)
            marks.add_metric([path], found.usage.marks)
            size.add_metric([path], found.usage.size)
            writers += [(path, told) for told in read_publisher_stats(folder)]
        yield from (progress, refused, present, depth, marks, size)
        yield from _publishers(writers)


def _publishers(writers: Sequence[tuple[str, WriterStats]]) -> Iterator[Metric]:
    for name, words in _PUBLISHER_COUNTERS.items():
        counter = CounterMetricFamily(f"rollcast_publish_{name}", words, labels=["spool", "run", "rank"])
        for spool, found in writers:
            counter.add_metric([spool, found.run_id, str(found.rank)], getattr(found, name))
        yield counter
    reasons = CounterMetricFamily(
        "rollcast_publish_dropped_by_reason",
        "Rollouts dropped, by reason.",
        labels=["spool", "run", "rank", "reason"],
    )
    for spool, found in writers:
        for reason, count in found.reasons.items():
            reasons.add_metric([spool, found.run_id, str(found.rank), reason], count)
    yield reasons
