"""The publisher: what a trainer calls after each rollout."""

import atexit
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import xxhash

from rollcast.producer.committer import CommitJob, Committer
from rollcast.producer.config import PublisherConfig
from rollcast.producer.context_parallel import ContextLayout
from rollcast.producer.control import Control, Refusal, Vote, decide
from rollcast.producer.copy import copy_own, receive_from, send_own
from rollcast.producer.errors import ProducerError, RolloutDataError, SpoolFullError
from rollcast.producer.parallel import current_layout
from rollcast.producer.plan import ShardPlan, make_plan
from rollcast.producer.shipper.launch import ShipperLauncher
from rollcast.producer.spool.folder import BundleName, SpoolFolder
from rollcast.producer.spool.write import BundleWriter
from rollcast.schemas.errors import ContractError
from rollcast.schemas.events import DpShard

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_EXIT_FLUSH_S = 5.0
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

    Making one is collective: every rank of the world does, after megatron-core's groups are set up. Trouble of the
    environment does not raise; publishing is then switched off, with one error in the log.

    Args:
        config: the same on every rank.
    """

    def __init__(self, config: PublisherConfig) -> None:
        self._config = config
        self._layout = current_layout()
        self._control = Control(self._layout, config.control_timeout_s)
        self._seen: set[int] = set()
        self._disabled: str | None = None
        self._committer: Committer | None = None
        if self._layout.takes_part:
            self._start()

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
        started = time.perf_counter()
        if not self._layout.takes_part:
            return PublishResult(status=PublishStatus.NOT_INVOLVED)
        if self._disabled is not None:
            return PublishResult(status=PublishStatus.DISABLED, reason=self._disabled)
        try:
            result = self._publish(rollout_id, rollout_data)
        except Exception as exc:  # the boundary to the training step: nothing may pass it
            if self._config.strict:
                raise
            self._disable(f"publishing rollout {rollout_id} failed: {exc!r}")
            result = PublishResult(status=PublishStatus.DISABLED, reason=self._disabled)
        return PublishResult(
            status=result.status,
            stall_s=time.perf_counter() - started,
            copied_bytes=result.copied_bytes,
            raw_bytes=result.raw_bytes,
            reason=result.reason,
        )

    def close(self, timeout_s: float) -> bool:
        """Commits what is filled and waits for Kafka to have it; tells whether all of this shard was delivered.

        What is not delivered within the bound stays in the spool, and the shipper goes on with it. Nothing can be
        published afterwards.
        """
        if self._committer is None:
            return self._disabled is None
        deadline = time.monotonic() + timeout_s
        drained = not self._undelivered()
        while not drained and time.monotonic() < deadline:
            time.sleep(_DRAIN_LOOK_EVERY_S)
            drained = not self._undelivered()
        finished = self._committer.close(max(0.0, deadline - time.monotonic()))
        atexit.unregister(self._flush_at_exit)
        self._trainer_lock.close()
        delivered = finished and drained and self._disabled is None
        self._disabled = self._disabled or "the publisher is closed"
        return delivered

    def _start(self) -> None:
        """Finds out, together with the other members, whether and how to publish."""
        try:
            self._spool = SpoolFolder(self._config.spool_dir)
            host = int(xxhash.xxh3_64_intdigest(_BOOT_ID.read_bytes())) >> 1
            token = self._spool.token.stat()
            earlier = [name.attempt for name, _ in self._spool.bundles_of(self._config.run_id)]
            attempt = self._config.attempt
            if attempt is None:
                attempt = max([time.time_ns() // 1_000_000, *(past + 1 for past in earlier)])
            message, problem = [1, attempt, host, token.st_dev, token.st_ino], None
        except (ProducerError, OSError) as exc:
            message, problem = [0, 0, 0, 0, 0], str(exc)
        answers = self._control.exchange(message)
        for member, answer in zip(self._control.members, answers, strict=True):
            if not answer[0]:
                own = member.rank == self._layout.rank
                self._disable(problem if own and problem else f"rank {member.rank} has no usable spool")
                return
        self._attempt = max(answer[1] for answer in answers)
        self._in_place = self._peers_share_the_spool([answer[2:] for answer in answers])
        if self._layout.is_writer:
            self._start_writer()

    def _start_writer(self) -> None:
        config = self._config
        self._trainer_lock = self._spool.register_trainer()
        self._spool.sweep_unfinished(config.run_id, self._layout.data_parallel_rank, self._attempt)
        launcher = ShipperLauncher(self._spool, config) if config.start_shipper else None
        self._committer = Committer(self._spool, config.run_id, config.commit_timeout_s, launcher)
        atexit.register(self._flush_at_exit)

    def _peers_share_the_spool(self, places: list[list[int]]) -> bool:
        if self._config.context_parallel_restore != "auto":
            return self._config.context_parallel_restore == "in_place"
        peers = [
            place
            for member, place in zip(self._control.members, places, strict=True)
            if member.data_parallel_rank == self._layout.data_parallel_rank
        ]
        return all(place == peers[0] for place in peers)

    def _publish(self, rollout_id: int, rollout_data: Mapping[str, Any]) -> PublishResult:
        name = BundleName(rollout_id, self._attempt, self._layout.data_parallel_rank)
        prepared = self._prepare(name, rollout_data)
        if isinstance(prepared, Exception):
            message = [self._vote_for(prepared, rollout_id), 0, rollout_id]
        else:
            message = [Vote.READY, prepared.plan.digest, rollout_id]
        refusal = decide(self._control.members, self._control.exchange(message))
        if refusal is not None:
            return self._refuse(name, refusal, prepared)
        assert not isinstance(prepared, Exception)  # noqa: S101  # its vote would have been the refusal
        self._seen.add(rollout_id)
        plan, bundle = prepared.plan, prepared.bundle
        if not self._in_place:
            # A message that fails leaves the peers out of step, so it ends publishing, as a lost peer does.
            copied = self._fill(plan, bundle)
        else:
            try:
                copied = self._fill(plan, bundle)
            except Exception as exc:  # noqa: BLE001  # whatever it is, this rollout alone is lost
                return self._give_up(name, exc)
        if self._committer is not None:
            fillers = self._layout.context_parallel_size if self._in_place else 1
            shard = self._event(name, plan, None)
            self._committer.submit(CommitJob(name=name, content=plan.records, shard=shard, peers=fillers))
        return PublishResult(status=PublishStatus.PUBLISHED, copied_bytes=copied, raw_bytes=plan.data_bytes)

    def _give_up(self, name: BundleName, error: Exception) -> PublishResult:
        """Drops an agreed rollout that this rank could not copy: without its mark the bundle is never committed."""
        reason = f"rank {self._layout.rank} could not copy its records: {error!r}"
        _log.error("rollout %d is dropped: %s", name.rollout_id, reason)
        if self._committer is not None:
            self._committer.submit(CommitJob(name=name, content=None, shard=self._event(name, None, reason), peers=0))
        if self._config.strict:
            raise ProducerError(f"rollout {name.rollout_id} is dropped: {reason}") from error
        return PublishResult(status=PublishStatus.DROPPED, reason=reason)

    def _prepare(self, name: BundleName, rollout_data: Mapping[str, Any]) -> "_Prepared | Exception":
        """Does everything that can fail before the ranks agree; a failure becomes this rank's vote."""
        try:
            if name.rollout_id < 0:
                raise RolloutDataError(f"rollout_id is {name.rollout_id}; it must not be negative")
            if name.rollout_id in self._seen:
                raise RolloutDataError(f"rollout {name.rollout_id} was published before in this attempt")
            plan = make_plan(
                rollout_data,
                self._layout,
                context_layout=ContextLayout(self._config.context_parallel_layout),
                in_place=self._in_place,
            )
            if not self._layout.is_writer and not self._in_place:
                return _Prepared(plan, None)
            self._check_quota(plan)
            return _Prepared(plan, BundleWriter(self._spool.filling(self._config.run_id, name), plan))
        except Exception as exc:  # noqa: BLE001  # whatever it is, the peers are waiting for this rank's vote
            return exc

    def _vote_for(self, error: Exception, rollout_id: int) -> Vote:
        if rollout_id in self._seen:
            return Vote.REPEATED
        if isinstance(error, SpoolFullError):
            return Vote.SPOOL_FULL
        return Vote.BAD_DATA if isinstance(error, (ContractError, TypeError, ValueError)) else Vote.FAILED

    def _check_quota(self, plan: ShardPlan) -> None:
        used = self._spool.used_bytes()
        if used + plan.data_bytes > self._config.max_spool_bytes:
            raise SpoolFullError(
                f"the spool {self._spool.path} holds {used} bytes and the shard has {plan.data_bytes}, above "
                f"max_spool_bytes {self._config.max_spool_bytes}; is Kafka reachable?"
            )

    def _fill(self, plan: ShardPlan, bundle: BundleWriter | None) -> int:
        layout, bucket_bytes = self._layout, self._config.gather_bucket_bytes
        if bundle is None:
            return send_own(
                plan, layout.context_parallel_rank, self._control.sender_to(layout.data_parallel_rank, 0), bucket_bytes
            )
        if layout.is_writer:
            bundle.file.write_header()
        copied = copy_own(plan, layout.context_parallel_rank, bundle.file.data)
        if not self._in_place:
            for peer in range(1, layout.context_parallel_size):
                receive = self._control.receiver_from(layout.data_parallel_rank, peer)
                receive_from(plan, peer, receive, bundle.file.data, bucket_bytes)
        bundle.mark_filled(layout.context_parallel_rank)
        return copied

    def _refuse(self, name: BundleName, refusal: Refusal, prepared: "_Prepared | Exception") -> PublishResult:
        error = prepared if isinstance(prepared, Exception) else None
        if not isinstance(prepared, Exception) and prepared.bundle is not None:
            prepared.bundle.discard()
        reason = f"{refusal.reason}: {error}" if error else refusal.reason
        _log.error("rollout %d is dropped: %s", name.rollout_id, reason)
        if refusal.announced:
            self._seen.add(name.rollout_id)
            if self._committer is not None:
                shard = self._event(name, None, refusal.reason)
                self._committer.submit(CommitJob(name=name, content=None, shard=shard, peers=0))
        if self._config.strict:
            raise RolloutDataError(f"rollout {name.rollout_id} is dropped: {reason}") from error
        return PublishResult(status=PublishStatus.DROPPED, reason=reason)

    def _event(self, name: BundleName, plan: ShardPlan | None, dropped_reason: str | None) -> DpShard:
        layout = self._layout
        return DpShard(
            run_id=self._config.run_id,
            attempt=name.attempt,
            rollout_id=name.rollout_id,
            data_parallel_rank=layout.data_parallel_rank,
            data_parallel_size=layout.data_parallel_size,
            rank=layout.rank,
            tensor_parallel_size=layout.tensor_parallel_size,
            pipeline_parallel_size=layout.pipeline_parallel_size,
            context_parallel_size=layout.context_parallel_size,
            context_parallel_layout=self._config.context_parallel_layout
            if layout.context_parallel_size > 1
            else "none",
            sample_count=len(plan.records.positions) if plan else 0,
            slot_digests=(),
            part_counts=(),
            raw_bytes=plan.data_bytes if plan else 0,
            replaced_values=plan.records.replaced_values if plan else 0,
            dropped_reason=dropped_reason,
            published_at_ms=time.time_ns() // 1_000_000,
        )

    def _undelivered(self) -> bool:
        return self._committer is not None and (
            self._committer.busy
            or any(
                name.data_parallel_rank == self._layout.data_parallel_rank
                for name, _ in self._spool.bundles_of(self._config.run_id)
            )
        )

    def _flush_at_exit(self) -> None:
        if self._committer is not None:
            self._committer.close(_EXIT_FLUSH_S)

    def _disable(self, reason: str) -> None:
        self._disabled = reason
        _log.error("publishing is switched off on rank %d, training goes on: %s", self._layout.rank, reason)
