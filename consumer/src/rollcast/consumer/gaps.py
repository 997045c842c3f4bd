"""Records that were gone from the log before they could be read."""

import logging
from collections import defaultdict, deque
from collections.abc import Iterable

from rollcast.consumer.outputs import dead_letter
from rollcast.consumer.rollout import OffsetSpan
from rollcast.consumer.stats import Stats
from rollcast.schemas import DeadLetter

_REMEMBERED_GAPS = 16

_log = logging.getLogger("rollcast.consumer")


class Gaps:
    """Remembers the latest gaps of each partition, for the manifests of the rollouts that they may have cost.

    Args:
        topic: with the partitions.
        stats: are counted.
    """

    def __init__(self, topic: str, stats: Stats) -> None:
        self._topic, self._stats = topic, stats
        self._known: dict[int, deque[OffsetSpan]] = defaultdict(lambda: deque(maxlen=_REMEMBERED_GAPS))

    def note(self, gap: OffsetSpan, cause: str) -> DeadLetter:
        """Counts, logs and remembers a gap; returns the dead letter that tells everybody else."""
        problem = f"offsets {gap.first} to {gap.last} are gone and were not read: {cause}"
        _log.error("%s[%d]: %s", self._topic, gap.partition, problem)
        self._known[gap.partition].append(gap)
        self._stats.gaps += 1
        self._stats.gap_offsets += gap.last - gap.first + 1
        return dead_letter(self._topic, gap.partition, gap.first, key=None, value=b"", reason=f"gap: {problem}")

    def beside(self, spans: Iterable[OffsetSpan]) -> tuple[OffsetSpan, ...]:
        """Returns the known gaps of the partitions in which a rollout has records."""
        return tuple(gap for span in spans for gap in self._known.get(span.partition, ()))
