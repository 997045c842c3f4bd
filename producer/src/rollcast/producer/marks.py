"""The marks of dropped rollouts: bundles without content, by which consumers tell dropped from lost."""

import logging
import shutil
from collections import deque
from dataclasses import dataclass, replace

from rollcast.producer.errors import BundleExistsError, SpoolError
from rollcast.producer.quota import Quota
from rollcast.producer.session import Session
from rollcast.producer.spool.folder import BundleName
from rollcast.producer.spool.usage import SpoolUsage
from rollcast.producer.spool.write import commit_bundle
from rollcast.schemas.events import DpShard

_MAX_WAITING = 10_000
_MAX_REASON_CHARACTERS = 4_000
# After a long time without Kafka there are many, and they take the interpreter lock from training.
_AT_ONCE = 100

_log = logging.getLogger("rollcast.producer")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Unmarked:
    """Drops that no mark of their own will announce, the oldest ones.

    Attributes:
        count: of them.
        first: the oldest.
        last: the youngest.
    """

    count: int
    first: BundleName
    last: BundleName


class DropMarks:
    """Commits the marks of one rank's dropped rollouts, for one thread.

    A mark that the disk does not take, or for which the spool has too many, waits in memory, and of those that wait too
    many are only counted: the next mark that is committed says how many had none, and which.
    """

    def __init__(self, session: Session) -> None:
        self._spool, self._run_id = session.spool, session.config.run_id
        self._claim_place = session.claim_place
        self._quota: Quota = session.quota
        self._waiting: deque[tuple[BundleName, DpShard]] = deque()
        self._unmarked: _Unmarked | None = None

    @property
    def waiting(self) -> int:
        """Number of dropped rollouts that are not announced."""
        # Read once: the thread that commits may clear it in between.
        unmarked = self._unmarked
        return len(self._waiting) + (unmarked.count if unmarked else 0)

    def put(self, name: BundleName, shard: DpShard) -> None:
        """Takes a drop to be announced; `commit` does it.

        Args:
            name: of the bundle that there is none of.
            shard: the closing event, with its reason.
        """
        # What was filled of it would take room until the next start.
        shutil.rmtree(self._spool.filling(self._run_id, name), ignore_errors=True)
        if len(self._waiting) == _MAX_WAITING:
            oldest, _ = self._waiting.popleft()
            before = self._unmarked
            self._unmarked = _Unmarked(
                count=before.count + 1 if before else 1, first=before.first if before else oldest, last=oldest
            )
        # Whatever an exception had to say must not make an event that Avro or Kafka refuses.
        reason = (shard.dropped_reason or "")[:_MAX_REASON_CHARACTERS].encode(errors="replace").decode()
        self._waiting.append((name, replace(shard, dropped_reason=reason)))

    def commit(self) -> None:
        """Commits what waits, as far as there is room; not all at once, so to be called again.

        Raises:
            SpoolError: the spool is gone.
            OSError: the disk does not take it.
        """
        if self._waiting and not self._spool.is_intact():
            raise SpoolError(f"the spool {self._spool.path} was removed or replaced")
        for _ in range(min(_AT_ONCE, len(self._waiting))):
            if not self._quota.takes_marks:
                return
            name, shard = self._waiting[0]
            if self._unmarked:
                more = f"{self._unmarked.count} more dropped, {self._unmarked.first} to {self._unmarked.last}"
                shard = replace(shard, dropped_reason=f"{shard.dropped_reason}; {more}, too many for an event each")
            marking, committed = self._spool.marking(self._run_id, name), self._claim_place(name)
            try:
                commit_bundle(marking, committed, None, shard)
            except BundleExistsError:
                # What has the name already is whole and will be shipped; a mark would contradict it.
                shutil.rmtree(marking, ignore_errors=True)
            else:
                self._quota.add(str(committed), SpoolUsage(marks=1))
                self._unmarked = None
            self._waiting.popleft()
