"""What a rank keeps beside training: its locks on the spool, the commit thread, and a shipper."""

import atexit
import logging
import os
import time

from rollcast.producer.committer import Committer
from rollcast.producer.session import Session
from rollcast.producer.shipper.launch import LOG_NAME, ShipperLauncher
from rollcast.producer.spool.trainers import LivingTrainer, register
from rollcast.producer.stats import Counters

_EXIT_FLUSH_S = 5.0
_DRAIN_LOOK_EVERY_S = 0.05

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
        self._session, self._process = session, os.getpid()
        spool.sweep_unfinished(config.run_id, session.attempt)
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
        while (drained := not (self.committer.busy or self._session.waiting())) is False:
            if time.monotonic() > deadline:
                break
            time.sleep(_DRAIN_LOOK_EVERY_S)
        # What is filled is not given up for a short bound.
        finished = self.committer.close(max(_EXIT_FLUSH_S, deadline - time.monotonic()))
        atexit.unregister(self._flush_at_exit)
        self._trainer_lock.close()
        self._run_lock.close()
        delivered = finished and drained and not self._session.set_aside()
        if not delivered:
            self._tell_what_waits(timeout_s)
        return delivered

    def _tell_what_waits(self, timeout_s: float) -> None:
        spool, config = self._session.spool, self._session.config
        said = f"; its log {spool.path / LOG_NAME} ends with: {self._launcher.last_words()}" if self._launcher else ""
        _log.warning(
            "after %g s, %d bundles of run %r wait in %s for Kafka at %s; rollcast-ship goes on%s",
            timeout_s,
            len(spool.bundles_of(config.run_id)),
            config.run_id,
            spool.path,
            config.bootstrap_servers,
            said,
        )

    def _flush_at_exit(self) -> None:
        # A forked child has the object, but not its thread.
        if os.getpid() == self._process:
            self.committer.close(_EXIT_FLUSH_S)
