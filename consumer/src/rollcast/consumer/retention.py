"""Which dumps of a run are removed after a new one has come."""

import errno
from collections.abc import Iterable
from dataclasses import dataclass

from rollcast.consumer.errors import ConsumeConfigError, QuotaError


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """What is kept of the complete train dumps of each run; by default all of them.

    The newest dumps are those of the highest attempt, and of it those of the highest rollouts. The dump that has just
    been written always stays. Incomplete dumps and policy-loss calls are never removed: their rollouts may be open.

    Attributes:
        keep_last: so many of the newest dumps stay; None for all.
        keep_every: each rollout whose number is a multiple of this stays beyond `keep_last`; None for no other.
        max_bytes: bytes of all dumps of a run, above which the oldest go, those of `keep_every` last; None for any.
        pinned: rollouts that always stay.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    max_bytes: int | None = None
    pinned: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Refuses values that cannot work."""
        for name, option in (
            ("keep_last", "--keep-last"),
            ("keep_every", "--keep-every"),
            ("max_bytes", "--max-dump-bytes"),
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConsumeConfigError(f"{name} ({option}) is {value}; it must be at least 1")
        if not self.removes and (self.keep_every or self.pinned):
            raise ConsumeConfigError(
                "keep_every (--keep-every) and pinned (--pin) are exceptions from keep_last (--keep-last) and "
                "max_bytes (--max-dump-bytes), of which neither is given"
            )

    @property
    def removes(self) -> bool:
        """Whether any dump is ever removed."""
        return self.keep_last is not None or self.max_bytes is not None


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of one rollout.

    Attributes:
        rollout_id: its number.
        attempt: the highest one.
        size: bytes of all its files, those of older attempts included.
    """

    rollout_id: int
    attempt: int
    size: int

    @property
    def age(self) -> tuple[int, int]:
        """What orders dumps, the oldest first."""
        return self.attempt, self.rollout_id


def what_goes(retention: Retention, others: Iterable[Kept], newest: Kept) -> list[Kept]:
    """Returns which of the `others` are removed for the sake of `newest`, in the order of removal.

    Args:
        retention: the rule.
        others: what is kept of the run's other rollouts.
        newest: what is kept of the rollout that has just come.

    Raises:
        QuotaError: what may not be removed is above `max_bytes` together with `newest`.
    """
    by_age = sorted(others, key=lambda kept: kept.age)
    goes: list[Kept] = []
    stays = by_age
    if retention.keep_last is not None:
        in_order = sorted([*by_age, newest], key=lambda kept: kept.age)
        last = {kept.rollout_id for kept in in_order[-retention.keep_last :]}
        goes = [kept for kept in by_age if kept.rollout_id not in last and not _excepted(retention, kept)]
        stays = [kept for kept in by_age if kept.rollout_id in last or _excepted(retention, kept)]
    if retention.max_bytes is not None:
        goes += _beyond_quota(retention, retention.max_bytes, stays, newest)
    return goes


def _excepted(retention: Retention, kept: Kept) -> bool:
    return kept.rollout_id in retention.pinned or _is_milestone(retention, kept)


def _is_milestone(retention: Retention, kept: Kept) -> bool:
    return retention.keep_every is not None and kept.rollout_id % retention.keep_every == 0


def _beyond_quota(retention: Retention, max_bytes: int, stays: list[Kept], newest: Kept) -> list[Kept]:
    excess = newest.size + sum(kept.size for kept in stays) - max_bytes
    goes: list[Kept] = []
    for kept in sorted(stays, key=lambda kept: (_is_milestone(retention, kept), kept.age)):
        if excess <= 0:
            break
        if kept.rollout_id not in retention.pinned:
            goes.append(kept)
            excess -= kept.size
    if excess > 0:
        raise QuotaError(
            errno.EDQUOT,
            f"rollout {newest.rollout_id} takes {newest.size} bytes and does not fit into max_bytes={max_bytes} "
            "(--max-dump-bytes) with the pinned rollouts; raise it, or pin fewer; nothing was removed",
        )
    return goes
