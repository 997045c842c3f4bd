"""Records of one rank alone, each a bundle in a stream of its own, about which no peer is asked."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rollcast.producer.committer import CommitJob, Committer
from rollcast.producer.copy import copy_own
from rollcast.producer.plan import make_plan
from rollcast.producer.result import DropReason, PublishResult, PublishStatus, drop_reason_of
from rollcast.producer.session import Session
from rollcast.producer.spool.folder import BundleName
from rollcast.producer.spool.usage import SpoolUsage
from rollcast.producer.stats import Counters

_log = logging.getLogger("rollcast.producer")


class AlonePublisher:
    """Publishes a rank's own records, numbered from 0."""

    def __init__(self, session: Session, committer: Committer, counters: Counters) -> None:
        self._session, self._committer, self._counters = session, committer, counters
        self._published = 0

    def publish(self, stream_kind: str, make_data: Callable[[], Mapping[str, Any]]) -> PublishResult:
        """Hands over what `make_data` returns, as the next record of `<stream_kind>/<global rank>`.

        Raises:
            Exception: whatever it was, with a strict publisher; otherwise the record is dropped.
        """
        session, rank = self._session, self._session.layout.rank
        number = self._published
        self._published += 1
        name = BundleName(number, session.attempt, f"loss{rank}")
        bundle = None
        try:
            sharing_nothing = replace(session.layout, context_parallel_rank=0, context_parallel_size=1)
            plan = make_plan(make_data(), sharing_nothing)
            # Not waited for: there are many of them in a step, and each would hold up this rank's peers.
            session.quota.await_room(plan.data_bytes, 1, session.rollout_key(name), 0.0)
            bundle = session.start_bundle(name, plan)
            try:
                copied = copy_own(plan, 0, bundle.file.data)
                bundle.mark_filled(0)
            except Exception:
                # No commit job follows, so nobody else would ever remove it.
                bundle.discard()
                raise
        except Exception as exc:  # whatever it is, this record alone is lost
            if session.config.strict:
                raise
            self._counters.dropped(DropReason.NOT_COPIED if bundle is not None else drop_reason_of(exc))
            _log.error("%s record %d of rank %d is dropped: %s", stream_kind, number, rank, exc)
            return PublishResult(status=PublishStatus.DROPPED, reason=str(exc))
        session.quota.add(session.rollout_key(name), SpoolUsage(plan.data_bytes, 1))
        shard = session.closing_event(number, plan, stream=f"{stream_kind}/{rank}")
        self._committer.submit(CommitJob(name=name, content=plan.records, shard=shard, peers=1))
        return PublishResult(status=PublishStatus.PUBLISHED, copied_bytes=copied, raw_bytes=plan.data_bytes)
