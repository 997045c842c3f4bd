"""The publisher: what a trainer calls after each rollout."""

import logging
import operator
import os
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollcast.producer.alone import AlonePublisher
from rollcast.producer.background import Background
from rollcast.producer.committer import CommitJob
from rollcast.producer.config import PublisherConfig
from rollcast.producer.context_parallel import ContextLayout
from rollcast.producer.control import Control, Refusal, Vote, decide, vote_for
from rollcast.producer.copy import copy_own
from rollcast.producer.errors import ControlError, ProducerError, RolloutDataError
from rollcast.producer.gather import receive_pieces, send_pieces
from rollcast.producer.parallel import current_layout
from rollcast.producer.plan import ShardPlan, make_plan
from rollcast.producer.quota import Quota
from rollcast.producer.result import DropReason, PublishResult, PublishStatus, Stopwatch, drop_reason_of
from rollcast.producer.session import Session, open_session
from rollcast.producer.spool.folder import BundleName
from rollcast.producer.spool.usage import SpoolUsage
from rollcast.producer.spool.write import BundleWriter
from rollcast.producer.stats import Counters, PublisherStats

# Digest and part count of a slot, and some room for the rest of the event.
_CLOSING_BYTES_A_SLOT = 20

_log = logging.getLogger("rollcast.producer")


@dataclass(frozen=True, slots=True)
class _Prepared:
    plan: ShardPlan
    bundle: BundleWriter | None


class Publisher:
    """Streams each rollout's records to Kafka while training goes on.

    Making one is collective: every rank of the world does, after megatron-core's groups are set up. A spool that
    cannot be used does not raise; publishing is then switched off, with one error in the log.

    Args:
        config: the same on every rank.

    Raises:
        ProducerError: megatron-core is missing, too old, or its groups are not set up.
    """

    def __init__(self, config: PublisherConfig) -> None:
        self._config = config
        self._layout = current_layout()
        self._control = Control(self._layout, config.control_timeout_s)
        self._seen: set[int] = set()
        self._process = os.getpid()
        self._counters = Counters()
        self._quota: Quota | None = None
        self._background: Background | None = None
        self._closed: bool | None = None
        self._disabled: str | None = None
        # Once it is true, no rank enters the control collective any more.
        self._everybody_off = False
        if not self._layout.takes_part:
            return
        try:
            self._session = open_session(config, self._layout, self._control)
        except Exception as exc:
            # The ranks have found out together, or cannot any more.
            self._everybody_off = True
            if config.strict:
                raise
            self._disable(str(exc))
            return
        try:
            self._start(self._session)
        except Exception as exc:  # noqa: BLE001  # the others do not know yet; they come to know at the next publish
            self._disable(str(exc))

    def publish(self, rollout_id: int, rollout_data: Mapping[str, Any]) -> PublishResult:
        """Hands a rollout over; every rank calls it with what it holds. Returns when its memory may be reused.

        It neither raises nor hangs: a rollout that one rank cannot publish is dropped whole on all of them, with a
        reason in the result, the log and the stream.

        Args:
            rollout_id: number of the rollout, not negative; once per attempt.
            rollout_data: this rank's shard: columns with one entry per sample, and fields of the whole shard.

        Raises:
            ProducerError: only with `strict`.
        """
        return self._guarded(
            lambda watch: self._publish(watch, rollout_id, rollout_data),
            f"rollout {_shown(rollout_id)}",
            counts=self._layout.is_writer,
        )

    def publish_alone(self, stream_kind: str, make_data: Callable[[], Mapping[str, Any]]) -> PublishResult:
        """Hands over records of this rank alone, as the next of its own stream, without asking its peers.

        Args:
            stream_kind: the stream is `<stream_kind>/<global rank>`.
            make_data: returns something like a shard without context parallelism; what it raises goes no further.

        Raises:
            ProducerError: only with `strict`.
        """
        return self._guarded(
            lambda _: self._publish_alone(stream_kind, make_data), f"a {stream_kind} record", counts=True
        )

    @property
    def stats(self) -> PublisherStats:
        """What this rank has published, dropped and waited so far, and what the spool held when it was looked at."""
        # Before the first rollout and after the end no thread looks; a forked child may have no lock that is free.
        if self._quota is not None and os.getpid() == self._process:
            self._quota.measure_if_overdue()
        return self._counters.snapshot(self._quota)

    def close(self, timeout_s: float) -> bool:
        """Ends the publisher: commits what is filled, and waits for Kafka to have it.

        True says that nothing of this rank is missing there: it could publish, nothing that it was given was dropped
        or set aside, and its spool has no bundle of it any more, those of earlier starts included. A shard is its
        writer's; other ranks answer for their policy-loss calls alone. Otherwise False, and a warning says what is
        missing, where it is, and who goes on with it, if anybody does.

        It takes at most `timeout_s`, and 5 s more where what is filled could not be committed within it. Nothing can
        be published afterwards. A second call returns the same at once; in a forked child, False and nothing is done.
        """
        if os.getpid() != self._process:
            return False
        if self._closed is None:
            was_on, background = self._disabled is None, self._background
            # Also where publishing was switched off meanwhile: what was filled before is to be committed and shipped.
            try:
                delivered = background is None or background.close(timeout_s)
            except OSError as exc:
                # The trainer has ended well, and must not fail for a spool that cannot be looked into any more.
                delivered = False
                _log.error("whether all of rank %d is in Kafka cannot be told: %s", self._layout.rank, exc)
            self._disabled, self._everybody_off = "the publisher is closed", True
            self._closed = delivered and was_on
        return self._closed

    def _start(self, session: Session) -> None:
        background = self._background = Background(session, self._counters)
        self._quota = session.quota
        self._committer = background.committer
        self._alone = AlonePublisher(session, self._committer, self._counters)

    def _guarded(self, work: Callable[[Stopwatch], PublishResult], what: str, *, counts: bool) -> PublishResult:
        watch = Stopwatch()
        if not self._layout.takes_part:
            return PublishResult(status=PublishStatus.NOT_INVOLVED)
        if os.getpid() != self._process:
            # The commit thread and the collective belong to the process that made this object.
            return PublishResult(status=PublishStatus.DISABLED, reason="the publisher was made before a fork")
        if self._everybody_off:
            if counts:
                self._counters.dropped(DropReason.OFF)
            return PublishResult(status=PublishStatus.DISABLED, reason=self._disabled)
        try:
            result = work(watch)
        except Exception as exc:  # the boundary to the training step: nothing may pass it
            has_lost_peers = isinstance(exc, ControlError)
            self._everybody_off = self._everybody_off or has_lost_peers
            if has_lost_peers or not self._config.strict:
                self._disable(f"publishing {what} failed: {exc!r}")
                if counts:
                    self._counters.dropped(DropReason.OFF if has_lost_peers else DropReason.UNEXPECTED)
            if self._config.strict:
                raise
            result = PublishResult(status=PublishStatus.DISABLED, reason=self._disabled)
        stall_s = watch.total_s
        self._counters.stalled(stall_s)
        laps = watch.laps
        return replace(
            result,
            stall_s=stall_s,
            prepare_s=laps["prepare"],
            room_s=laps["room"],
            agree_s=laps["agree"],
            copy_s=laps["copy"],
        )

    def _publish(self, watch: Stopwatch, rollout_id: int, rollout_data: Mapping[str, Any]) -> PublishResult:
        name = BundleName(_number(rollout_id), self._session.attempt, self._session.shard_source)
        self._check_spool()
        prepared = self._prepare(watch, name, rollout_id, rollout_data)
        watch.lap("prepare")
        try:
            return self._agree(watch, name, prepared)
        except ControlError as exc:
            self._lose_peers(name, prepared, exc)
            raise

    def _agree(self, watch: Stopwatch, name: BundleName, prepared: _Prepared | Exception) -> PublishResult:
        """Publishes the rollout if every rank can.

        Raises:
            ControlError: a peer is gone.
        """
        messages = self._control.start_exchange(self._message(name, prepared))
        # While they travel; should the rollout be refused, its bundle is thrown away.
        copied = self._copy(prepared)
        watch.lap("copy")
        refusal = decide(self._control.members, messages())
        watch.lap("agree")
        if refusal is not None:
            return self._refuse(name, refusal, prepared)
        assert not isinstance(prepared, Exception)  # noqa: S101  # its vote would have been the refusal
        self._seen.add(name.rollout_id)
        plan, bundle = prepared.plan, prepared.bundle
        try:
            # Before anything of this rank can fail: nobody must be left sending.
            sent = 0 if self._session.in_place else self._send_or_receive(plan, bundle)
            if bundle is not None and not isinstance(copied, Exception):
                bundle.mark_filled(self._layout.context_parallel_rank)
        except ControlError:
            raise
        except Exception as exc:  # noqa: BLE001  # whatever it is, this rollout alone is lost
            return self._give_up(name, bundle, exc)
        if isinstance(copied, Exception):
            # Not raised above, which would give it a traceback.
            return self._give_up(name, bundle, copied)
        watch.lap("copy")
        shards = self._session.shards_here
        self._session.quota.add(self._session.rollout_key(name), SpoolUsage(shards * plan.data_bytes, shards))
        self._committer.start()
        if self._layout.is_writer:
            fillers = self._layout.context_parallel_size if self._session.in_place else 1
            shard = self._session.closing_event(name.rollout_id, plan)
            self._committer.submit(CommitJob(name=name, content=plan.records, shard=shard, peers=fillers))
        return PublishResult(status=PublishStatus.PUBLISHED, copied_bytes=copied + sent, raw_bytes=plan.data_bytes)

    def _message(self, name: BundleName, prepared: _Prepared | Exception) -> list[int]:
        """Returns this rank's vote, plan digest and rollout id."""
        if self._disabled is not None:
            # The others are about to wait for this rank's vote.
            return [Vote.OFF, 0, name.rollout_id]
        if isinstance(prepared, Exception):
            return [self._vote_for(prepared, name.rollout_id), 0, name.rollout_id]
        return [Vote.READY, prepared.plan.digest, name.rollout_id]

    def _publish_alone(self, stream_kind: str, make_data: Callable[[], Mapping[str, Any]]) -> PublishResult:
        self._check_spool()
        if self._disabled is not None:
            self._counters.dropped(DropReason.OFF)
            return PublishResult(status=PublishStatus.DISABLED, reason=self._disabled)
        return self._alone.publish(stream_kind, make_data)

    def _prepare(
        self, watch: Stopwatch, name: BundleName, rollout_id: object, rollout_data: Mapping[str, Any]
    ) -> _Prepared | Exception:
        """Does everything that can fail before the ranks agree; a failure becomes this rank's vote."""
        in_place = self._session.in_place
        try:
            if self._disabled is not None:
                raise ProducerError(self._disabled)
            if name.rollout_id < 0:
                raise RolloutDataError(f"rollout_id is {_shown(rollout_id)}; it must be an integer from 0 to 2**63 - 1")
            if not isinstance(rollout_data, Mapping):
                raise RolloutDataError(f"rollout_data is a {type(rollout_data).__name__}; it must be a mapping")
            if name.rollout_id in self._seen:
                raise RolloutDataError(
                    f"rollout {name.rollout_id} was published or dropped before in this attempt; use the next id"
                )
            context_layout = ContextLayout(self._config.context_parallel_layout)
            plan = make_plan(rollout_data, self._layout, context_layout=context_layout, in_place=in_place)
            if len(plan.records.positions) * _CLOSING_BYTES_A_SLOT > self._config.max_part_bytes:
                raise RolloutDataError(
                    f"the shard has {len(plan.records.positions)} samples: its closing event would not fit "
                    f"max_part_bytes {self._config.max_part_bytes}; use more data-parallel ranks or raise it"
                )
            if not self._layout.is_writer and not in_place:
                return _Prepared(plan, None)
            watch.lap("prepare")
            try:
                self._await_room(name, plan)
            finally:
                watch.lap("room")
            return _Prepared(plan, self._session.start_bundle(name, plan))
        except Exception as exc:  # noqa: BLE001  # whatever it is, the peers are waiting for this rank's vote
            return exc

    def _vote_for(self, error: Exception, rollout_id: int) -> Vote:
        if rollout_id in self._seen:
            return Vote.REPEATED
        return vote_for(drop_reason_of(error))

    def _await_room(self, name: BundleName, plan: ShardPlan) -> None:
        session = self._session
        key = session.rollout_key(name)
        session.quota.await_room(plan.data_bytes, session.shards_here, key, self._config.block_up_to_s)

    def _check_spool(self) -> None:
        spool = self._session.spool
        if self._disabled is None and not spool.is_intact():
            self._disable(f"the spool {spool.path} was removed or replaced while the trainer runs; start it again")

    def _count_drop(self, kind: DropReason) -> None:
        # A shard has several ranks, and is counted once.
        if self._layout.is_writer:
            self._counters.dropped(kind)

    def _copy(self, prepared: _Prepared | Exception) -> int | Exception:
        """Copies what this rank holds into its bundle, if it has one; never raises, for peers may wait."""
        if isinstance(prepared, Exception) or prepared.bundle is None:
            return 0
        try:
            return copy_own(prepared.plan, self._layout.context_parallel_rank, prepared.bundle.file.data)
        except Exception as exc:  # noqa: BLE001  # whatever it is, this rollout alone is lost
            # Its frames and who holds it refer to each other, and keep the rollout's memory until they are collected.
            return exc.with_traceback(None)

    def _send_or_receive(self, plan: ShardPlan, bundle: BundleWriter | None) -> int:
        """Sends what this rank holds to its writer, or takes what the peers of this writer hold; returns bytes sent."""
        bucket_bytes = self._config.gather_bucket_bytes
        if bundle is None:
            return send_pieces(plan, self._layout, self._control, bucket_bytes)
        receive_pieces(plan, self._layout, self._control, bundle.file.data, bucket_bytes)
        return 0

    def _refuse(self, name: BundleName, refusal: Refusal, prepared: _Prepared | Exception) -> PublishResult:
        error = prepared if isinstance(prepared, Exception) else None
        _discard(prepared)
        reason = refusal.told_on(self._layout.rank, error)
        if refusal.final:
            self._everybody_off = True
            self._disable(self._disabled or refusal.reason)
            self._count_drop(refusal.kind)
            return PublishResult(status=PublishStatus.DISABLED, reason=self._disabled)
        if refusal.announced and name.rollout_id >= 0:
            self._seen.add(name.rollout_id)
            self._announce_drop(name, reason)
        return self._dropped(name, refusal.kind, reason, error)

    def _give_up(self, name: BundleName, bundle: BundleWriter | None, error: Exception) -> PublishResult:
        """Drops an agreed rollout that this rank could not copy: without its mark the bundle is never committed."""
        reason = f"rank {self._layout.rank} could not copy its records: {error!r}"
        if bundle is not None:
            bundle.mark_failed(self._layout.context_parallel_rank, reason)
        self._announce_drop(name, reason)
        return self._dropped(name, DropReason.NOT_COPIED, reason, error)

    def _lose_peers(self, name: BundleName, prepared: _Prepared | Exception, error: ControlError) -> None:
        """Gives up a rollout whose peers are gone; the writers that are left say so, so that no consumer waits."""
        _discard(prepared)
        is_repeat = isinstance(prepared, Exception) and name.rollout_id in self._seen
        if self._disabled is None and name.rollout_id >= 0 and not is_repeat:
            self._announce_drop(name, str(error))

    def _announce_drop(self, name: BundleName, reason: str) -> None:
        if self._layout.is_writer:
            shard = self._session.closing_event(name.rollout_id, None, dropped_reason=reason)
            self._committer.submit(CommitJob(name=name, content=None, shard=shard, peers=0))

    def _dropped(self, name: BundleName, kind: DropReason, reason: str, error: Exception | None) -> PublishResult:
        self._count_drop(kind)
        what = f"rollout {name.rollout_id}" if name.rollout_id >= 0 else "a rollout"
        words = f"{what} is dropped: {reason}"
        _log.error("%s", words)
        if self._config.strict:
            raise RolloutDataError(words) from error
        return PublishResult(status=PublishStatus.DROPPED, reason=reason)

    def _disable(self, reason: str) -> None:
        if self._disabled is not None:
            return
        self._disabled = reason
        _log.error("publishing is switched off on rank %d, training goes on: %s", self._layout.rank, reason)


def _discard(prepared: _Prepared | Exception) -> None:
    if not isinstance(prepared, Exception) and prepared.bundle is not None:
        prepared.bundle.discard()


def _number(rollout_id: object) -> int:
    """Returns a rollout id as a plain integer, -1 where it is none: the exchange must take place whatever it is."""
    if isinstance(rollout_id, bool):
        return -1
    try:
        number = operator.index(rollout_id)  # type: ignore[arg-type]  # that it may be anything is the point
    except Exception:  # noqa: BLE001  # also of what it runs where it is no number of Python's
        return -1
    return number if 0 <= number < 2**63 else -1


def _shown(rollout_id: object) -> str:
    """Returns a rollout id as an error names it, short and whatever it is."""
    try:
        return reprlib.repr(rollout_id)
    except Exception:  # noqa: BLE001  # Python writes no integer of more than 4,300 digits
        return f"of type {type(rollout_id).__name__} and cannot be shown"
