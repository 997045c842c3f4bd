"""Rollouts whose dump could not be written, until the next try."""

import errno
import logging
from dataclasses import dataclass

from rollcast.consumer.assembler import Assembler
from rollcast.consumer.brief import brief
from rollcast.consumer.errors import ConsumerError
from rollcast.consumer.rollout import Rollout, RolloutId
from rollcast.schemas.sizes import counted

# Of the name, or of who may use it: as long as that stands nothing else fails, and a try can cost a whole dump.
_LASTING = {
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENOTEMPTY,
    errno.ENAMETOOLONG,
    errno.EILSEQ,
    errno.EINVAL,
    errno.ELOOP,
    errno.EACCES,
    errno.EPERM,
    errno.EFBIG,
}
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0
_LONGEST_LASTING_DELAY_S = 300.0
_BETWEEN_TRIES_S = 0.5
_LOG_EVERY_S = 60.0

_log = logging.getLogger("rollcast.consumer")


def is_lasting(exc: OSError) -> bool:
    """Returns whether the failure is of this dump alone and somebody has to do something; a full disk is neither."""
    return not exc.retriable if isinstance(exc, ConsumerError) else exc.errno in _LASTING


@dataclass(slots=True)
class _Entry:
    problem: str
    lasting: bool
    delay_s: float
    due_at: float


class Waiting:
    """Knows when to try again; the rollouts stay with the assembler, and so hold their room and the low watermark.

    A try costs up to a whole dump, so there is a pause after one that fails, whatever is due.

    Args:
        assembler: holds them; one that it has let go is waited for no longer.
    """

    def __init__(self, assembler: Assembler) -> None:
        self._assembler = assembler
        self._entries: dict[RolloutId, _Entry] = {}
        self._not_before = 0.0
        self._logged_at = -_LOG_EVERY_S

    @property
    def failing(self) -> dict[str, str]:
        """What is tried again, with the problem."""
        return {f"write the dump of {rollout_id}": entry.problem for rollout_id, entry in self._present()}

    def count(self, *, lasting: bool) -> int:
        """Returns how many wait because of a failure that lasts, or because of another one."""
        return sum(entry.lasting is lasting for _, entry in self._present())

    def put_back(self, rollout: Rollout, exc: OSError, now: float) -> None:
        """Has the rollout wait for its next try, after one that has just failed."""
        if not self._assembler.put_back(rollout, holds_up_reading=not is_lasting(exc)):
            return
        known = self._entries.get(rollout.id)
        longest_s = _LONGEST_LASTING_DELAY_S if is_lasting(exc) else _LONGEST_DELAY_S
        delay_s = _FIRST_DELAY_S if known is None else min(2 * known.delay_s, longest_s)
        entry = self._entries[rollout.id] = _Entry(brief(exc), is_lasting(exc), delay_s, now + delay_s)
        self._not_before = now + _BETWEEN_TRIES_S
        if known is not None and now - self._logged_at < _LOG_EVERY_S:
            return
        self._logged_at = now
        _log.warning(
            "could not write the dump of %s: %s; next try in %g s; waiting: %s, no offset moves past that",
            rollout.id,
            entry.problem,
            delay_s,
            counted(len(self._entries), "dump"),
        )

    def written(self, rollout_id: RolloutId) -> None:
        """Notes that its dump is durable, or will never be."""
        if self._entries.pop(rollout_id, None) is not None:
            self._not_before = 0.0

    def due(self, now: float) -> Rollout | None:
        """Hands out the rollout whose next try is due for longest; None if none is."""
        for rollout_id, entry in sorted(self._present(), key=lambda each: each[1].due_at):
            if max(entry.due_at, self._not_before) > now:
                break
            if (rollout := self._assembler.hand_out_again(rollout_id)) is not None:
                return rollout
        return None

    def pause_s(self, now: float) -> float | None:
        """Returns how long it is until the next try; None if none is due ever."""
        due_at = min((entry.due_at for _, entry in self._present()), default=None)
        return None if due_at is None else max(0.0, max(due_at, self._not_before) - now)

    def _present(self) -> list[tuple[RolloutId, _Entry]]:
        for rollout_id in [each for each in self._entries if not self._assembler.is_tried(each)]:
            del self._entries[rollout_id]
        return list(self._entries.items())
