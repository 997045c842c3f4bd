"""The daemon's counters for Prometheus. No label tells a rollout, and runs are told apart up to `stats.MAX_RUNS`."""

import time
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from rollcast.consumer.assembler import Assembler
from rollcast.consumer.health import Health
from rollcast.consumer.reading_clock import ReadingClock
from rollcast.consumer.retry import Retry
from rollcast.consumer.scratch import Scratch
from rollcast.consumer.stats import DEAD_LETTER_KINDS, Stats
from rollcast.consumer.waiting import Waiting
from rollcast.consumer.watchdog import Watchdog

_COUNTERS = {
    "records": "Records read.",
    "record_bytes": "Bytes of the records read.",
    "dumps": "Complete dumps written.",
    "incomplete_dumps": "Incomplete dumps written.",
    "already_published": "Rollouts found in the store.",
    "duplicates": "Records that repeated one already held or finished.",
    "stale": "Records of a superseded attempt.",
    "superseded": "Unfinished rollouts given up for a higher attempt.",
    "dropped": "Rollouts that the producer gave up.",
    "evicted": "Incomplete rollouts whose records had to make room.",
    "given_up": "Rollouts written as incomplete before their time, to make room.",
    "lost_dead_letters": "Dead letters that Kafka refused for good.",
    "retries": "Failed tries of what is tried again.",
    "gaps": "Ranges of offsets that were gone before they were read.",
    "gap_offsets": "Offsets in those ranges.",
    "client_rebuilds": "Kafka clients replaced because they brought nothing.",
}


class DaemonCollector(Collector):
    """Reads the daemon's own state at each scrape."""

    def __init__(
        self,
        stats: Stats,
        *,
        assembler: Assembler,
        scratch: Scratch,
        clock: ReadingClock,
        watchdog: Watchdog,
        retry: Retry,
        waiting: Waiting,
        health: Health,
    ) -> None:
        self._stats, self._assembler, self._scratch = stats, assembler, scratch
        self._clock, self._watchdog, self._health = clock, watchdog, health
        self._retry, self._waiting = retry, waiting

    def collect(self) -> Iterator[Metric]:
        """Yields every series, those that are 0 too, apart from those of runs."""
        stats = self._stats
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"rollcast_{name}", text, value=getattr(stats, name))
        letters = dict.fromkeys(DEAD_LETTER_KINDS, 0) | stats.dead_letters
        yield _by("rollcast_dead_letters", "Records that could not be used.", "reason", letters)
        unused = CounterMetricFamily("rollcast_unused_records", "Records not simply used.", labels=["run", "reason"])
        for (run_id, reason), count in stats.by_run.items():
            unused.add_metric([run_id, reason], count)
        yield unused
        failed = stats.failed_metrics.total()
        yield CounterMetricFamily("rollcast_failed_metrics", "Metrics that could not be computed.", value=failed)
        yield SummaryMetricFamily(
            "rollcast_dump_seconds",
            "From a rollout handed out to its durable dump.",
            count_value=stats.dumps + stats.incomplete_dumps,
            sum_value=stats.dump_seconds,
        )
        yield from self._gauges()

    def _gauges(self) -> Iterator[Metric]:
        now = time.monotonic()
        opened_at, member, lag = self._assembler.oldest_opened_at, self._health.member, self._watchdog.lag
        degraded = self._retry.failing or self._waiting.failing
        oldest_s = 0.0 if opened_at is None else self._clock.now - opened_at
        yield GaugeMetricFamily(
            "rollcast_lag_records",
            "Offsets not read in the assigned partitions; NaN while Kafka does not tell.",
            value=float("nan") if lag is None else lag,
        )
        for name, text, value in (
            ("open_rollouts", "Rollouts that are not durable.", self._assembler.open_count),
            ("oldest_open_seconds", "For how long all was read and the oldest of them not whole.", oldest_s),
            ("resident_bytes", "Memory that their records take, about.", self._assembler.resident_bytes),
            ("scratch_bytes", "Size of the files that their tensors lie in.", self._scratch.used_bytes),
            ("seconds_since_progress", "Since records were taken or a dump written.", now - self._stats.progressed_at),
            ("assigned_partitions", "Partitions that the group gave it.", member.partition_count if member else 0),
            ("degraded", "1 while something fails and is tried again.", int(bool(degraded))),
        ):
            yield GaugeMetricFamily(f"rollcast_{name}", text, value=value)
        waiting = GaugeMetricFamily(
            "rollcast_waiting_dumps",
            "Dumps that could not be written and are tried again; cause: of this dump alone (name), or other (disk).",
            labels=["cause"],
        )
        for cause, lasting in (("name", True), ("disk", False)):
            waiting.add_metric([cause], self._waiting.count(lasting=lasting))
        yield waiting


def registry_of(collectors: Iterable[Collector]) -> CollectorRegistry:
    """Returns a registry with these collectors and the process's own memory, time and open files."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    for collector in collectors:
        registry.register(collector)
    return registry


def _by(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family
