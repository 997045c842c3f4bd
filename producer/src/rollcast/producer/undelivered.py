"""Says what waits in the spool for Kafka: when a publisher closes, and before, once nothing leaves the spool."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rollcast.producer.session import Session
from rollcast.producer.shipper.launch import LOG_NAME, ShipperLauncher
from rollcast.producer.spool.folder import BundleName
from rollcast.producer.spool.usage import bundles_in_words

_LOOK_EVERY_S = 10.0
_QUIET_S = 60.0
_TELL_EVERY_S = 600.0

_log = logging.getLogger("rollcast.producer")


class DeliveryWatch:
    """Warns where bundles wait and none of them leaves the spool, so that a wrong address is known before `close`.

    Each writer of a spool has one, and the writer of the first bundle speaks for all.

    Args:
        session: of this rank.
        launcher: of its shipper, if it starts one.
        clock: seconds that only grow.
    """

    def __init__(
        self, session: Session, launcher: ShipperLauncher | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._session, self._launcher, self._clock = session, launcher, clock
        self._seen: set[Path] = set()
        self._next_look = self._quiet_since = 0.0

    def look(self) -> None:
        """Looks into the spool, unless it did just now; to be called about every second, not on the training thread.

        Raises:
            OSError: the spool cannot be read.
        """
        now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_EVERY_S
        found = self._session.spool.bundles(self._session.config.destination)
        waited = [(name, path) for name, path in found if path in self._seen]
        if not waited or len(waited) < len(self._seen):
            self._quiet_since = now
        self._seen = {path for _, path in found}
        if now - self._quiet_since < _QUIET_S:
            return
        # Not looked at meanwhile: a spool that fills up takes ever longer to list.
        self._next_look = now + _TELL_EVERY_S
        if self._speaks_for(waited):
            words = waiting_in_words(self._session, self._launcher, [path for _, path in found])
            _log.warning("nothing has gone to Kafka for %.0f s: %s", now - self._quiet_since, words)

    def _speaks_for(self, waited: Sequence[tuple[BundleName, Path]]) -> bool:
        session = self._session
        folder = session.spool.run_folder(session.config.run_id)
        sources = (name.source for name, path in waited if path.parent == folder and name.attempt == session.attempt)
        return next(sources, None) in session.own_sources


def waiting_in_words(session: Session, launcher: ShipperLauncher | None, bundles: Sequence[Path]) -> str:
    """Returns how many bundles wait where, who ships them, and what the shipper of `launcher` said last."""
    spool, config = session.spool, session.config
    told = f"waiting in {spool.path} for Kafka at {config.bootstrap_servers}: {bundles_in_words(bundles)}, and "
    if spool.has_shipper(config.destination):
        told += "the rollcast-ship that runs there goes on"
    else:
        command = f"rollcast-ship --spool {spool.path} --bootstrap {config.bootstrap_servers}"
        command += f" --topic-prefix {config.topic_prefix}"
        told += f"no rollcast-ship owns that spool now; if none comes up, start one: {command}"
    return told + (f"; {spool.path / LOG_NAME} ends with: {launcher.last_words()}" if launcher else "")
