"""What Prometheus sees of the shipper, and of the publishers beside it."""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollcast.producer.errors import ShipperError
from rollcast.producer.shipper.publisher_stats import WriterStats, read_publisher_stats
from rollcast.producer.shipper.stats import ShipperStats
from rollcast.producer.spool.folder import SpoolFolder
from rollcast.producer.spool.usage import measure_spool

LOOPBACK = "127.0.0.1"

_SHIPPER_COUNTERS = {
    "shipped_bundles": "Bundles that Kafka has acknowledged whole.",
    "shipped_bytes": "Raw size of their tensors.",
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


class MetricsEndpoint:
    """Serves `/metrics` on the loopback address while the context is open.

    Args:
        port: 0 for any free one; None for no endpoint.
        spools: what to export.
    """

    def __init__(self, port: int | None, spools: Sequence[tuple[SpoolFolder, ShipperStats]]) -> None:
        self._port, self._spools = port, spools

    def __enter__(self) -> Self:
        """Starts to serve.

        Raises:
            ShipperError: the port is taken.
        """
        if self._port is not None:
            registry = CollectorRegistry()
            registry.register(_SpoolCollector(self._spools))
            try:
                self._server, self._thread = start_http_server(self._port, addr=LOOPBACK, registry=registry)
            except OSError as exc:
                raise ShipperError(
                    f"metrics cannot be served on {LOOPBACK}:{self._port} ({exc.strerror}); give another --metrics-port"
                ) from exc
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops to serve."""
        if self._port is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


class _SpoolCollector(Collector):
    """Looks everything up when it is asked; series are bounded by the number of spools and of their writers."""

    def __init__(self, spools: Sequence[tuple[SpoolFolder, ShipperStats]]) -> None:
        self._spools = spools

    def collect(self) -> Iterator[Metric]:
        for name, words in _SHIPPER_COUNTERS.items():
            counter = CounterMetricFamily(f"rollcast_ship_{name}", words, labels=["spool"])
            for spool, stats in self._spools:
                counter.add_metric([str(spool.path)], getattr(stats, name))
            yield counter
        progress = GaugeMetricFamily(
            "rollcast_ship_seconds_since_progress",
            "Seconds for which bundles have waited without any being acknowledged.",
            labels=["spool"],
        )
        depth = GaugeMetricFamily("rollcast_spool_bundles", "Bundles that wait.", labels=["spool"])
        size = GaugeMetricFamily("rollcast_spool_bytes", "Their size, unfinished ones included.", labels=["spool"])
        for spool, stats in self._spools:
            label = [str(spool.path)]
            progress.add_metric(label, stats.seconds_since_progress)
            depth.add_metric(label, len(spool.bundles()))
            size.add_metric(label, measure_spool(spool.path).size)
        yield from (progress, depth, size)
        writers = [(str(spool.path), found) for spool, _ in self._spools for found in read_publisher_stats(spool.path)]
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
