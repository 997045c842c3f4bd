"""What a rank keeps beside training: its locks on the spool, the commit thread, and a shipper."""

import atexit
import logging
import os
import time

from rollcast.producer.committer import Committer
from rollcast.producer.session import Session
from rollcast.producer.shipper.launch import ShipperLauncher
from rollcast.producer.spool.trainers import LivingTrainer, register
from rollcast.producer.stats import Counters
from rollcast.producer.undelivered import waiting_in_words
from rollcast.schemas.sizes import counted

_EXIT_FLUSH_S = 5.0
_DRAIN_LOOK_EVERY_S = 0.05
_NAMED_BUNDLES = 10

_log = logging.getLogger("rollcast.producer")


class Background:
    """Everything of a publisher that goes on between two rollouts.

    Attributes:
        committer: takes the filled bundles.

    Raises:
        SpoolError: another process publishes the same attempt.
        OSError: the spool cannot be written.
    """

    def __init__(self, session: Session, counters: Counters) -> None:
        config, spool = session.config, session.spool
        self._session, self._counters, self._process = session, counters, os.getpid()
        if swept := spool.sweep_unfinished(config.run_id, session.attempt):
            _log.warning(
                "lost with a trainer that ended before they were whole: %s (%s)",
                counted(len(swept), "bundle"),
                ", ".join(swept[:_NAMED_BUNDLES]),
            )
        self._trainer_lock = spool.register_trainer()
        spool.set_destination(config.run_id, config.destination)
        trainer = LivingTrainer(session.attempt, self._process)
        self._run_lock = register(spool.run_folder(config.run_id), session.layout.rank, trainer)
        self._launcher = ShipperLauncher(spool, config) if config.start_shipper else None
        self.committer = Committer(session, counters, self._launcher)
        atexit.register(self._flush_at_exit)

    def close(self, timeout_s: float) -> bool:
        """Commits and waits for delivery; tells whether all of this rank was delivered. See `Publisher.close`."""
        deadline = time.monotonic() + timeout_s
        while self.committer.open_jobs or self.committer.unannounced or self._session.waiting():
            if time.monotonic() > deadline:
                break
            time.sleep(_DRAIN_LOOK_EVERY_S)
        # What is filled is not given up for a short bound.
        self.committer.close(max(_EXIT_FLUSH_S, deadline - time.monotonic()))
        atexit.unregister(self._flush_at_exit)
        missing = self._missing()
        if missing:
            rank, run_id = self._session.layout.rank, self._session.config.run_id
            _log.warning("not all of rank %d of run %r is in Kafka: %s", rank, run_id, "; ".join(missing))
        self._trainer_lock.close()
        self._run_lock.close()
        return not missing

    def _missing(self) -> list[str]:
        """Returns what of this rank is not in Kafka, and what becomes of it."""
        session, missing = self._session, []
        path = session.spool.path
        dropped = {reason: count for reason, count in self._counters.snapshot().dropped.items() if count}
        if dropped:
            missing.append(f"dropped were {', '.join(f'{count} ({reason})' for reason, count in dropped.items())}")
        if count := self.committer.open_jobs:
            missing.append(f"not committed yet, and lost if this process ends: {counted(count, 'bundle')}")
        if count := self.committer.unannounced:
            missing.append(f"not announced, because {path} took no mark of them: {counted(count, 'drop')}")
        if count := session.set_aside():
            aside = path / ".poison"
            missing.append(f"cannot be shipped: {counted(count, 'bundle')}; {aside} has them, each with its reason")
        if waiting := session.waiting():
            missing.append(waiting_in_words(session, self._launcher, waiting))
        return missing

    def _flush_at_exit(self) -> None:
        # A forked child has the object, but not its thread.
        if os.getpid() == self._process:
            self.committer.close(_EXIT_FLUSH_S)
