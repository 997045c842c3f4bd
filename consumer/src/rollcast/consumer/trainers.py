"""Trainers of one run that were restarted, and such that are at work at the same time."""

import logging
from collections import OrderedDict

from rollcast.consumer.brief import brief
from rollcast.consumer.decisions import Stale
from rollcast.schemas import DpShard

_REMEMBERED = 1024
# A shipper has passed on what was left long before.
_LEFT_FOR_S = 600.0

_log = logging.getLogger("rollcast.consumer")


class Trainers:
    """Tells, once for each attempt, what an ordinary restart leaves from what is an alarm.

    All that the first trainer of a restarted run published, it published before the second one began, however late its
    records come. What is published later has another one at work; and so has what does not end, for a trainer whose
    clock went back seems to have published before.
    """

    def __init__(self) -> None:
        # The highest attempt of each run, and when its first rollout was published, as far as is known.
        self._newest: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._left_since: OrderedDict[tuple[str, int], float] = OrderedDict()
        self._alarmed: set[tuple[str, int, str]] = set()

    def saw(self, event: DpShard) -> None:
        """Takes each closing event, used or not."""
        attempt, begun_ms = self._newest.get(event.run_id, (event.attempt, event.published_at_ms))
        if event.attempt < attempt:
            if event.published_at_ms > begun_ms and self._is_news(event.run_id, event.attempt, "at work"):
                _log.warning(
                    "run %r: attempt %d published rollout %d after attempt %d had begun: two trainers share one run id",
                    brief(event.run_id),
                    event.attempt,
                    event.rollout_id,
                    attempt,
                )
            return
        earliest_ms = begun_ms if event.attempt == attempt else event.published_at_ms
        self._newest[event.run_id] = (event.attempt, min(earliest_ms, event.published_at_ms))
        self._newest.move_to_end(event.run_id)
        if len(self._newest) > _REMEMBERED:
            self._newest.popitem(last=False)

    def left(self, stale: Stale, now: float) -> None:
        """Takes each record that is not needed because of a higher attempt, at this time of the reading clock."""
        run_id, attempt = stale.rollout_id.run_id, stale.rollout_id.attempt
        since = self._left_since.get((run_id, attempt))
        if since is None:
            self._left_since[run_id, attempt] = now
            if len(self._left_since) > _REMEMBERED:
                self._left_since.popitem(last=False)
            _log.info(
                "%s is not used, since attempt %d sends it again: a trainer that is restarted leaves such records",
                stale.rollout_id,
                stale.current_attempt,
            )
        elif now - since >= _LEFT_FOR_S and self._is_news(run_id, attempt, "still sends"):
            _log.warning(
                "%s is not used, since attempt %d has begun, and attempt %d still sends %.0f minutes later: "
                "two trainers share one run id, or the clock of one went back",
                stale.rollout_id,
                stale.current_attempt,
                attempt,
                (now - since) / 60,
            )

    def _is_news(self, run_id: str, attempt: int, what: str) -> bool:
        if (run_id, attempt, what) in self._alarmed:
            return False
        if len(self._alarmed) >= _REMEMBERED:
            self._alarmed.clear()
        self._alarmed.add((run_id, attempt, what))
        return True
