"""The background thread of a rank: commits filled bundles, keeps a shipper alive, prepares memory for the next one."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rollcast.producer.errors import SpoolError
from rollcast.producer.marks import DropMarks
from rollcast.producer.plan import ShardRecords
from rollcast.producer.result import DropReason
from rollcast.producer.session import Session
from rollcast.producer.shipper.launch import ShipperLauncher
from rollcast.producer.spool.folder import BundleName
from rollcast.producer.spool.read import TENSORS_NAME
from rollcast.producer.spool.write import commit_bundle, failure_of, is_filled
from rollcast.producer.stats import Counters, StatsFile
from rollcast.producer.undelivered import DeliveryWatch
from rollcast.schemas.events import TRAIN_STREAM, DpShard

_LOOK_EVERY_S = 0.005
_TEND_EVERY_S = 1.0
_OTHERS_COPY_S = 0.05

_log = logging.getLogger("rollcast.producer")


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitJob:
    """A bundle to commit.

    Attributes:
        name: of the bundle.
        content: its records; None where the rollout was dropped.
        shard: the closing event, digests and part counts still empty.
        peers: context-parallel peers that must have filled their part.
        submitted_at: on the monotonic clock.
    """

    name: BundleName
    content: ShardRecords | None
    shard: DpShard
    peers: int
    submitted_at: float = field(default_factory=time.monotonic)


class _PeerError(SpoolError):
    """A context-parallel peer says that it could not copy its part."""


class Committer:
    """Commits in the background; its thread starts with the first rollout, so nothing runs before a fork.

    Attributes:
        open_jobs: jobs that wait or are being worked on.
    """

    def __init__(self, session: Session, counters: Counters, launcher: ShipperLauncher | None) -> None:
        config, layout = session.config, session.layout
        self._spool, self._run_id = session.spool, config.run_id
        self._fill_timeout_s, self._fsync = config.commit_timeout_s, config.fsync == "background"
        self._files, self._claim_place = session.files, session.claim_place
        self._quota, self._counters, self._launcher = session.quota, counters, launcher
        self._stats = StatsFile(session.spool.path, config.run_id, layout.rank, counters)
        self._shards_here, self._spare_bytes = session.shards_here, 0
        self._jobs: queue.SimpleQueue[CommitJob | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.open_jobs = 0
        self._has_committed = False
        self._troubles: dict[str, str] = {}
        self._marks = DropMarks(session)
        self._watch = DeliveryWatch(session, launcher)
        self._lock = threading.Lock()

    @property
    def unannounced(self) -> int:
        """Number of dropped rollouts of which the spool has no mark yet."""
        return self._marks.waiting

    def start(self) -> None:
        """Starts the thread, unless it runs: also a peer that commits nothing has mappings to prepare."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="rollcast-commit", daemon=True)
            self._thread.start()

    def submit(self, job: CommitJob) -> None:
        """Takes a job; returns at once."""
        self.start()
        with self._lock:
            self.open_jobs += 1
        self._jobs.put(job)

    def close(self, timeout_s: float) -> bool:
        """Finishes the jobs taken so far and ends the thread; tells whether that was within the bound."""
        if self._thread is None:
            return True
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_TEND_EVERY_S)
            except queue.Empty:
                self._tend()
                # Not right after a commit: the shipper may be quick to give a file back.
                self._try("keep a spare file", self._keep_spares)
                continue
            if job is None:
                self._record()
                return
            # Other ranks may still be copying, on the same cores. Not with a lower priority: who waits for a core and
            # has the interpreter lock keeps it from the training thread meanwhile.
            time.sleep(max(0.0, job.submitted_at + _OTHERS_COPY_S - time.monotonic()))
            self._try("take a rollout", partial(self._commit_or_drop, job))
            self._has_committed = True
            with self._lock:
                self.open_jobs -= 1
            self._tend()

    def _tend(self) -> None:
        if not self._spool.is_intact():
            # Whatever is made there now would be a second spool, with a second shipper.
            self._complain("be found", "the folder was removed or replaced")
            return
        self._try("be measured", self._quota.measure)
        self._record()
        # A rank that commits nothing leaves the shipper to those that do.
        if self._has_committed:
            if self._launcher is not None:
                self._try("be given a shipper", self._launcher.tend)
            self._try("be looked into for what waits", self._watch.look)
        self._try("have its pool prepared", self._files.prefault)

    def _record(self) -> None:
        self._try("take the marks of dropped rollouts", self._marks.commit)
        self._try("take this rank's counters", self._stats.write)

    def _try(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as exc:  # noqa: BLE001  # the thread must live on, and do the other things
            self._complain(what, str(exc) or repr(exc))

    def _complain(self, what: str, why: str) -> None:
        if self._troubles.get(what) != why:
            self._troubles[what] = why
            _log.error("the spool %s cannot %s now: %s", self._spool.path, what, why)

    def _keep_spares(self) -> None:
        if self._spare_bytes:
            self._spool.pool.keep_spares(self._shards_here, self._spare_bytes)

    def _commit_or_drop(self, job: CommitJob) -> None:
        if job.content is None:
            self._marks.put(job.name, job.shard)
            return
        try:
            self._commit(job, job.content)
        except Exception as exc:  # noqa: BLE001  # whatever it is, the rollout becomes a dropped one
            _log.error("rollout %d is dropped: %s", job.name.rollout_id, exc)
            self._counters.dropped(DropReason.NOT_COPIED if isinstance(exc, _PeerError) else DropReason.NOT_COMMITTED)
            self._marks.put(job.name, _dropped(job.shard, f"its bundle could not be committed: {exc}"))
        else:
            self._counters.published(job.shard.raw_bytes)

    def _commit(self, job: CommitJob, content: ShardRecords) -> None:
        if not self._spool.is_intact():
            raise SpoolError(f"the spool {self._spool.path} was removed or replaced")
        filling = self._spool.filling(self._run_id, job.name)
        self._wait_filled(filling, job.peers)
        if job.shard.stream == TRAIN_STREAM:
            self._spare_bytes = (filling / TENSORS_NAME).stat().st_size
        commit_bundle(filling, self._claim_place(job.name), content, job.shard, fsync=self._fsync)

    def _wait_filled(self, filling: Path, peers: int) -> None:
        # Looking, not waiting on a primitive: the peers are other processes, and only the file system is shared.
        deadline = time.monotonic() + self._fill_timeout_s
        while not is_filled(filling, peers):
            if (failure := failure_of(filling)) is not None:
                raise _PeerError(failure)
            if not filling.exists():
                # A peer that has lost the others gives the bundle up, or somebody has tidied.
                raise SpoolError(f"{filling} was removed before it was filled")
            if time.monotonic() > deadline:
                raise SpoolError(f"a context-parallel peer did not fill its part within {self._fill_timeout_s:g} s")
            time.sleep(_LOOK_EVERY_S)


def _dropped(shard: DpShard, reason: str) -> DpShard:
    return replace(shard, sample_count=0, raw_bytes=0, replaced_values=0, dropped_reason=reason)
