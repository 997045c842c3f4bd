"""The publisher: what a trainer calls after each rollout."""

import atexit
import logging
import operator
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from rollcast.producer.committer import CommitJob, Committer
from rollcast.producer.config import PublisherConfig
from rollcast.producer.context_parallel import ContextLayout
from rollcast.producer.control import Control, Refusal, Vote, decide
from rollcast.producer.copy import copy_own, receive_from, send_own
from rollcast.producer.errors import ControlError, ProducerError, RolloutDataError, SpoolFullError
from rollcast.producer.parallel import current_layout
from rollcast.producer.plan import ShardPlan, make_plan
from rollcast.producer.session import Session, alone, open_session
from rollcast.producer.shipper.launch import LOG_NAME, ShipperLauncher
from rollcast.producer.spool.folder import BundleName
from rollcast.producer.spool.write import BundleWriter
from rollcast.schemas.errors import ContractError

_EXIT_FLUSH_S = 5.0
# Digest and part count of a slot, and some room for the rest of the event.
_CLOSING_BYTES_A_SLOT = 20
_DRAIN_LOOK_EVERY_S = 0.05

_log = logging.getLogger("rollcast.producer")


class PublishStatus(StrEnum):
    """What became of a rollout on this rank."""

    PUBLISHED = "published"
    DROPPED = "dropped"
    NOT_INVOLVED = "not involved"
    DISABLED = "disabled"


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishResult:
    """What one `publish` did on this rank.

    Attributes:
        status: what became of the rollout.
        stall_s: seconds that the training thread spent.
        copied_bytes: bytes that this rank copied.
        raw_bytes: tensor bytes of the whole shard.
        reason: why it was not published.
    """

    status: PublishStatus
    stall_s: float = 0.0
    copied_bytes: int = 0
    raw_bytes: int = 0
    reason: str | None = None


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
        self._published_alone = 0
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
        return self._guarded(lambda: self._publish(rollout_id, rollout_data), f"rollout {rollout_id}")

    def publish_alone(self, stream_kind: str, make_data: Callable[[], Mapping[str, Any]]) -> PublishResult:
        """Hands over records of this rank alone, as the next of its own stream, without asking its peers.

        Args:
            stream_kind: the stream is `<stream_kind>/<global rank>`.
            make_data: returns something like a shard without context parallelism; what it raises goes no further.

        Raises:
            ProducerError: only with `strict`.
        """
        return self._guarded(lambda: self._publish_alone(stream_kind, make_data), f"a {stream_kind} record")

    def close(self, timeout_s: float) -> bool:
        """Commits what is filled and waits for Kafka to have it; tells whether all of this rank was delivered.

        What is not delivered within the bound stays in the spool, and the shipper goes on with it. Nothing can be
        published afterwards.
        """
        if not self._layout.takes_part or self._disabled is not None:
            return self._disabled is None
        deadline = time.monotonic() + timeout_s
        while (drained := not (self._committer.busy or self._session.waiting())) is False:
            if time.monotonic() > deadline:
                break
            time.sleep(_DRAIN_LOOK_EVERY_S)
        # What is filled is not given up for a short bound.
        finished = self._committer.close(max(_EXIT_FLUSH_S, deadline - time.monotonic()))
        atexit.unregister(self._flush_at_exit)
        self._trainer_lock.close()
        self._disabled, self._everybody_off = "the publisher is closed", True
        delivered = finished and drained and not self._session.set_aside()
        if not delivered:
            self._tell_what_waits(timeout_s)
        return delivered

    def _tell_what_waits(self, timeout_s: float) -> None:
        spool = self._session.spool
        said = f"; its log {spool.path / LOG_NAME} ends with: {self._launcher.last_words()}" if self._launcher else ""
        _log.warning(
            "after %g s, %d bundles of run %r wait in %s for Kafka at %s; rollcast-ship goes on%s",
            timeout_s,
            len(spool.bundles_of(self._config.run_id)),
            self._config.run_id,
            spool.path,
            self._config.bootstrap_servers,
            said,
        )

    def _start(self, session: Session) -> None:
        config = self._config
        session.spool.sweep_unfinished(config.run_id, session.attempt)
        self._trainer_lock = session.spool.register_trainer()
        session.spool.set_destination(config.run_id, config.destination)
        self._launcher = ShipperLauncher(session.spool, config) if config.start_shipper else None
        self._committer = Committer(session, self._launcher)
        atexit.register(self._flush_at_exit)

    def _guarded(self, work: Callable[[], PublishResult], what: str) -> PublishResult:
        started = time.perf_counter()
        if not self._layout.takes_part:
            return PublishResult(status=PublishStatus.NOT_INVOLVED)
        if os.getpid() != self._process:
            # The commit thread and the collective belong to the process that made this object.
            return PublishResult(status=PublishStatus.DISABLED, reason="the publisher was made before a fork")
        if self._everybody_off:
            return PublishResult(status=PublishStatus.DISABLED, reason=self._disabled)
        try:
            result = work()
        except Exception as exc:  # the boundary to the training step: nothing may pass it
            self._everybody_off = self._everybody_off or isinstance(exc, ControlError)
            if self._config.strict:
                raise
            self._disable(f"publishing {what} failed: {exc!r}")
            result = PublishResult(status=PublishStatus.DISABLED, reason=self._disabled)
        return replace(result, stall_s=time.perf_counter() - started)

    def _publish(self, rollout_id: int, rollout_data: Mapping[str, Any]) -> PublishResult:
        number = _number(rollout_id)
        name = BundleName(number, self._session.attempt, self._session.shard_source)
        prepared = self._prepare(name, rollout_data)
        if self._disabled is not None:
            # The others are about to wait for this rank's vote.
            message = [Vote.OFF, 0, number]
        elif isinstance(prepared, Exception):
            message = [self._vote_for(prepared, number), 0, number]
        else:
            message = [Vote.READY, prepared.plan.digest, number]
        refusal = decide(self._control.members, self._control.exchange(message))
        if refusal is not None:
            return self._refuse(name, refusal, prepared)
        assert not isinstance(prepared, Exception)  # noqa: S101  # its vote would have been the refusal
        self._seen.add(number)
        plan, bundle = prepared.plan, prepared.bundle
        try:
            copied = (
                self._copy_in_place(plan, bundle) if self._session.in_place else self._send_and_receive(plan, bundle)
            )
        except ControlError:
            raise
        except Exception as exc:  # noqa: BLE001  # whatever it is, this rollout alone is lost
            return self._give_up(name, exc)
        self._committer.start()
        if self._layout.is_writer:
            fillers = self._layout.context_parallel_size if self._session.in_place else 1
            shard = self._session.closing_event(number, plan)
            self._committer.submit(CommitJob(name=name, content=plan.records, shard=shard, peers=fillers))
        return PublishResult(status=PublishStatus.PUBLISHED, copied_bytes=copied, raw_bytes=plan.data_bytes)

    def _publish_alone(self, stream_kind: str, make_data: Callable[[], Mapping[str, Any]]) -> PublishResult:
        if self._disabled is not None:
            return PublishResult(status=PublishStatus.DISABLED, reason=self._disabled)
        number = self._published_alone
        self._published_alone += 1
        name = BundleName(number, self._session.attempt, f"loss{self._layout.rank}")
        try:
            plan = make_plan(make_data(), alone(self._layout))
            self._check_quota(plan)
            bundle = self._session.start_bundle(name, plan)
            copied = copy_own(plan, 0, bundle.file.data)
            bundle.mark_filled(0)
        except Exception as exc:  # whatever it is, this record alone is lost
            if self._config.strict:
                raise
            _log.error("%s record %d of rank %d is dropped: %s", stream_kind, number, self._layout.rank, exc)
            return PublishResult(status=PublishStatus.DROPPED, reason=str(exc))
        shard = self._session.closing_event(number, plan, stream=f"{stream_kind}/{self._layout.rank}")
        self._committer.submit(CommitJob(name=name, content=plan.records, shard=shard, peers=1))
        return PublishResult(status=PublishStatus.PUBLISHED, copied_bytes=copied, raw_bytes=plan.data_bytes)

    def _prepare(self, name: BundleName, rollout_data: Mapping[str, Any]) -> _Prepared | Exception:
        """Does everything that can fail before the ranks agree; a failure becomes this rank's vote."""
        in_place = self._session.in_place
        try:
            if self._disabled is not None:
                raise ProducerError(self._disabled)
            if name.rollout_id < 0:
                raise RolloutDataError("rollout_id must be an integer from 0 to 2**63 - 1")
            if not isinstance(rollout_data, Mapping):
                raise RolloutDataError(f"rollout_data is a {type(rollout_data).__name__}; it must be a mapping")
            if name.rollout_id in self._seen:
                raise RolloutDataError(f"rollout {name.rollout_id} was published before in this attempt")
            context_layout = ContextLayout(self._config.context_parallel_layout)
            plan = make_plan(rollout_data, self._layout, context_layout=context_layout, in_place=in_place)
            if len(plan.records.positions) * _CLOSING_BYTES_A_SLOT > self._config.max_part_bytes:
                raise RolloutDataError(
                    f"the shard has {len(plan.records.positions)} samples: its closing event would not fit "
                    f"max_part_bytes {self._config.max_part_bytes}; use more data-parallel ranks or raise it"
                )
            if not self._layout.is_writer and not in_place:
                return _Prepared(plan, None)
            if self._layout.is_writer:
                self._check_quota(plan)
            return _Prepared(plan, self._session.start_bundle(name, plan))
        except Exception as exc:  # noqa: BLE001  # whatever it is, the peers are waiting for this rank's vote
            return exc

    def _vote_for(self, error: Exception, rollout_id: int) -> Vote:
        if rollout_id in self._seen:
            return Vote.REPEATED
        if isinstance(error, SpoolFullError):
            return Vote.SPOOL_FULL
        return Vote.BAD_DATA if isinstance(error, (ContractError, TypeError, ValueError)) else Vote.FAILED

    def _check_quota(self, plan: ShardPlan) -> None:
        used = self._committer.spool_bytes()
        if used + plan.data_bytes > self._config.max_spool_bytes:
            raise SpoolFullError(
                f"the spool {self._session.spool.path} holds {used} bytes and the shard has {plan.data_bytes}, above "
                f"max_spool_bytes {self._config.max_spool_bytes}; is Kafka reachable?"
            )

    def _copy_in_place(self, plan: ShardPlan, bundle: BundleWriter | None) -> int:
        assert bundle is not None  # noqa: S101  # every peer made one
        rank = self._layout.context_parallel_rank
        copied = copy_own(plan, rank, bundle.file.data)
        bundle.mark_filled(rank)
        return copied

    def _send_and_receive(self, plan: ShardPlan, bundle: BundleWriter | None) -> int:
        layout, bucket_bytes = self._layout, self._config.gather_bucket_bytes
        if bundle is None:
            send = self._control.sender_to(layout.data_parallel_rank, 0)
            return send_own(plan, layout.context_parallel_rank, send, bucket_bytes)
        failed = []
        # All messages are taken before anything of this rank can fail: nobody must be left sending.
        for peer in range(1, layout.context_parallel_size):
            receive = self._control.receiver_from(layout.data_parallel_rank, peer)
            if not receive_from(plan, peer, receive, bundle.file.data, bucket_bytes):
                failed.append(peer)
        if failed:
            raise ProducerError(f"context-parallel peers {failed} could not read their records")
        copied = copy_own(plan, 0, bundle.file.data)
        bundle.mark_filled(0)
        return copied

    def _refuse(self, name: BundleName, refusal: Refusal, prepared: _Prepared | Exception) -> PublishResult:
        error = prepared if isinstance(prepared, Exception) else None
        if not isinstance(prepared, Exception) and prepared.bundle is not None:
            prepared.bundle.discard()
        reason = f"{refusal.reason}: {error}" if error else refusal.reason
        if refusal.final:
            self._everybody_off = True
            self._disable(self._disabled or refusal.reason)
            return PublishResult(status=PublishStatus.DISABLED, reason=self._disabled)
        if refusal.announced:
            self._seen.add(name.rollout_id)
            self._announce_drop(name, refusal.reason)
        return self._dropped(name, reason, error)

    def _give_up(self, name: BundleName, error: Exception) -> PublishResult:
        """Drops an agreed rollout that this rank could not copy: without its mark the bundle is never committed."""
        reason = f"rank {self._layout.rank} could not copy its records: {error!r}"
        self._announce_drop(name, reason)
        return self._dropped(name, reason, error)

    def _announce_drop(self, name: BundleName, reason: str) -> None:
        if self._layout.is_writer and name.rollout_id >= 0:
            shard = self._session.closing_event(name.rollout_id, None, dropped_reason=reason)
            self._committer.submit(CommitJob(name=name, content=None, shard=shard, peers=0))

    def _dropped(self, name: BundleName, reason: str, error: Exception | None) -> PublishResult:
        _log.error("rollout %d is dropped: %s", name.rollout_id, reason)
        if self._config.strict:
            raise RolloutDataError(f"rollout {name.rollout_id} is dropped: {reason}") from error
        return PublishResult(status=PublishStatus.DROPPED, reason=reason)

    def _flush_at_exit(self) -> None:
        if os.getpid() == self._process:
            self._committer.close(_EXIT_FLUSH_S)

    def _disable(self, reason: str) -> None:
        if self._disabled is not None:
            return
        self._disabled = reason
        _log.error("publishing is switched off on rank %d, training goes on: %s", self._layout.rank, reason)


def _number(rollout_id: object) -> int:
    """Returns a rollout id as a plain integer, -1 where it is none: the exchange must take place whatever it is."""
    if isinstance(rollout_id, bool):
        return -1
    try:
        number = operator.index(rollout_id)  # type: ignore[arg-type]  # that it may be anything is the point
    except TypeError:
        return -1
    return number if 0 <= number < 2**63 else -1
