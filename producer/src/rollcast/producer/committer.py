"""The background thread of a rank: commits filled bundles, keeps a shipper alive, prepares memory for the next one."""

import contextlib
import logging
import os
import queue
import shutil
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

from rollcast.producer.errors import SpoolError
from rollcast.producer.plan import ShardRecords
from rollcast.producer.session import Session
from rollcast.producer.shipper.launch import ShipperLauncher
from rollcast.producer.spool.folder import BundleName
from rollcast.producer.spool.write import commit_bundle, is_filled
from rollcast.schemas.events import DpShard

_LOOK_EVERY_S = 0.005
_TEND_EVERY_S = 1.0
_KEPT_MARKS = 10_000
_NICE = 10

_log = logging.getLogger("rollcast.producer")


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitJob:
    """A bundle to commit.

    Attributes:
        name: of the bundle.
        content: its records; None where the rollout was dropped.
        shard: the closing event, digests and part counts still empty.
        peers: context-parallel peers that must have filled their part.
    """

    name: BundleName
    content: ShardRecords | None
    shard: DpShard
    peers: int


class Committer:
    """Commits in the background; its thread starts with the first rollout, so nothing runs before a fork."""

    def __init__(self, session: Session, launcher: ShipperLauncher | None) -> None:
        self._spool, self._run_id = session.spool, session.config.run_id
        self._fill_timeout_s = session.config.commit_timeout_s
        self._files = session.files
        self._launcher = launcher
        self._jobs: queue.SimpleQueue[CommitJob | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._open_jobs = 0
        self._has_committed = False
        self._trouble = ""
        # Small, and few: marks that a full disk has not taken. A rollout without one would look lost, not dropped.
        self._unmarked: deque[CommitJob] = deque(maxlen=_KEPT_MARKS)
        self._submitted_bytes = 0
        self._measured_bytes = self._spool.used_bytes()
        self._lock = threading.Lock()

    @property
    def busy(self) -> bool:
        """Tells whether a job is waiting or being worked on."""
        return self._open_jobs > 0

    def spool_bytes(self) -> int:
        """Returns about how much the spool holds; measured in the background, for walking it takes a while."""
        return self._measured_bytes + self._submitted_bytes

    def start(self) -> None:
        """Starts the thread, unless it runs: also a peer that commits nothing has mappings to prepare."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="rollcast-commit", daemon=True)
            self._thread.start()

    def submit(self, job: CommitJob) -> None:
        """Takes a job; returns at once."""
        self.start()
        with self._lock:
            self._open_jobs += 1
            self._submitted_bytes += job.shard.raw_bytes
        self._jobs.put(job)

    def close(self, timeout_s: float) -> bool:
        """Finishes the jobs taken so far and ends the thread; tells whether that was within the bound."""
        if self._thread is None:
            return True
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            # Training goes first: the peers may still be copying on the same cores.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while True:
            try:
                job = self._jobs.get(timeout=_TEND_EVERY_S)
            except queue.Empty:
                self._tend()
                continue
            if job is None:
                return
            try:
                self._commit_or_drop(job)
            except Exception as exc:  # noqa: BLE001  # the thread must live on, whatever became of one bundle
                _log.error("rollout %d: its mark could not be committed yet: %r", job.name.rollout_id, exc)
                self._unmarked.append(_dropped(job, "its bundle could not be committed"))
            finally:
                self._has_committed = True
                with self._lock:
                    self._open_jobs -= 1
            self._tend()

    def _tend(self) -> None:
        try:
            self._measure()
            while self._unmarked:
                self._commit_or_drop(self._unmarked[0])
                self._unmarked.popleft()
            # A rank that commits nothing leaves the shipper to those that do.
            if self._launcher is not None and self._has_committed:
                self._launcher.tend()
            self._files.prefault()
        except OSError as exc:
            if str(exc) != self._trouble:
                self._trouble = str(exc)
                _log.error("the spool %s cannot be tended now: %s", self._spool.path, exc)

    def _measure(self) -> None:
        with self._lock:
            self._submitted_bytes = 0
        self._measured_bytes = self._spool.used_bytes()

    def _commit_or_drop(self, job: CommitJob) -> None:
        committed = self._spool.committed(self._run_id, job.name)
        if job.content is not None:
            filling = self._spool.filling(self._run_id, job.name)
            try:
                self._wait_filled(filling, job.peers)
                commit_bundle(filling, committed, job.content, job.shard)
            except Exception as exc:  # noqa: BLE001  # whatever it is, the rollout becomes a dropped one
                shutil.rmtree(filling, ignore_errors=True)
                _log.error("rollout %d is dropped: %s", job.name.rollout_id, exc)
                job = _dropped(job, f"its bundle could not be committed: {exc}")
            else:
                return
        commit_bundle(self._spool.marking(self._run_id, job.name), committed, None, job.shard)

    def _wait_filled(self, filling: Path, peers: int) -> None:
        # Looking, not waiting on a primitive: the peers are other processes, and only the file system is shared.
        deadline = time.monotonic() + self._fill_timeout_s
        while not is_filled(filling, peers):
            if time.monotonic() > deadline:
                raise SpoolError(f"a context-parallel peer did not fill its part within {self._fill_timeout_s:g} s")
            time.sleep(_LOOK_EVERY_S)


def _dropped(job: CommitJob, reason: str) -> CommitJob:
    reason = job.shard.dropped_reason or reason
    shard = replace(job.shard, sample_count=0, raw_bytes=0, replaced_values=0, dropped_reason=reason)
    return CommitJob(name=job.name, content=None, shard=shard, peers=job.peers)
