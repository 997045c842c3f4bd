"""Puts rollouts together from records in any order; pure: no I/O, no clock, no torch."""

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from rollcast.consumer.decisions import (
    Complete,
    Conflict,
    Decision,
    Discarded,
    Dropped,
    Duplicate,
    Evicted,
    Incomplete,
    Late,
    Stale,
    Superseded,
)
from rollcast.consumer.errors import AssemblerFullError, ConflictError
from rollcast.consumer.open_rollout import OpenRollout, Phase, resident_size
from rollcast.consumer.rollout import Place, Rollout, RolloutId, RolloutKey, SlotCut
from rollcast.schemas import DpShard, SamplePart

_REMEMBERED_ROLLOUTS = 65_536
_HANDED_OUT = (Phase.COMPLETE_HANDED_OUT, Phase.INCOMPLETE_HANDED_OUT)
_WAITING = (Phase.COMPLETE_WAITING, Phase.INCOMPLETE_WAITING)
_COMPLETE = (Phase.COMPLETE_HANDED_OUT, Phase.COMPLETE_WAITING)


class Assembler:
    """Records in, decisions out; counts alone decide what is complete, never order or time.

    A rollout that was handed out (`Complete`, `Incomplete`) stays open, and holds the low watermark, until `finish`
    says that it is durable. Finished rollouts are remembered for as long as there is room; whoever reads a topic
    again asks its store about a rollout that `knows` denies, and tells `remember`.

    A rollout whose incomplete dump is durable holds the low watermark no longer, but its records stay in memory until
    their room is needed, so that what comes late can complete it. After a restart or a rebalance its records below
    the watermark are gone from this member's view, and it completes only if they are sent again.

    A rollout whose dump could not be written is put back: it waits, with all that it has, to be handed out again.

    The memory that placed slices of parts stand in is somebody else's; it is free once nothing refers to the parts.

    Args:
        incomplete_after_s: a rollout without a new record for so long is handed out as `Incomplete`.
        max_resident_bytes: cap on the memory that the records held take, about.
    """

    def __init__(self, *, incomplete_after_s: float, max_resident_bytes: int) -> None:
        self._incomplete_after_s = incomplete_after_s
        self._max_resident_bytes = max_resident_bytes
        self._open: dict[RolloutId, OpenRollout] = {}
        self._latest: dict[RolloutKey, int] = {}
        self._finished: OrderedDict[RolloutKey, int] = OrderedDict()
        self._resident_bytes = 0
        self._serials = itertools.count(1)

    @property
    def open_count(self) -> int:
        """Rollouts that are not durable, complete or not."""
        return sum(rollout.phase is not Phase.INCOMPLETE_DURABLE for rollout in self._open.values())

    @property
    def awaits_finish(self) -> bool:
        """Whether a rollout was handed out and is not finished, so that room may come free by itself."""
        return any(
            rollout.phase in _HANDED_OUT or (rollout.phase in _WAITING and rollout.holds_up_reading)
            for rollout in self._open.values()
        )

    @property
    def awaits_another_try(self) -> bool:
        """Whether a rollout that was handed out was put back."""
        return any(rollout.phase in _WAITING for rollout in self._open.values())

    @property
    def resident_bytes(self) -> int:
        """Memory that the records held take, about."""
        return self._resident_bytes

    @property
    def oldest_opened_at(self) -> float | None:
        """When the first record came of the rollout that is open, and not durable, for longest."""
        opened = (rollout.opened_at for rollout in self._open.values() if rollout.phase is not Phase.INCOMPLETE_DURABLE)
        return min(opened, default=None)

    def knows(self, key: RolloutKey) -> bool:
        """Returns whether the rollout is open or remembered as finished."""
        return key in self._latest or key in self._finished

    def awaits(self, rollout: Rollout) -> bool:
        """Returns whether the rollout is open still, and this is what was handed out of it last.

        If not, its partition was given away or all of it is being done again, and nobody needs this.
        """
        held = self._open.get(rollout.id)
        return held is not None and held.serial == rollout.serial

    def remember(self, key: RolloutKey, attempt: int) -> None:
        """Notes that this attempt of the rollout is finished: its records, and those of lower ones, are not needed."""
        self._finished[key] = max(attempt, self._finished.get(key, attempt))
        self._finished.move_to_end(key)
        if len(self._finished) > _REMEMBERED_ROLLOUTS:
            self._finished.popitem(last=False)

    def wants(self, part: SamplePart) -> bool:
        """Returns whether the part, which has passed `check_event`, would be held if it were added now."""
        identity = _identity(part)
        rollout = self._open.get(identity)
        return self._superfluous(identity) is None and (rollout is None or rollout.lacks(part))

    def rivals_of(self, part: SamplePart) -> Sequence[SamplePart]:
        """Returns the parts held with its identity, if it would be held too should it say something else than they."""
        rollout = self._open.get(_identity(part))
        return () if rollout is None or self._superfluous(rollout.id) is not None else rollout.rivals_of(part)

    def add(self, event: SamplePart | DpShard, place: Place, *, size: int, now: float) -> list[Decision]:
        """Takes one record and returns what follows from it; nothing, where it is merely one more piece.

        Args:
            event: has passed `check_event`.
            place: of its record.
            size: of its record.
            now: monotonic time in seconds.

        Raises:
            InvalidRecordError: the record contradicts a closing event.
            AssemblerFullError: there is no room for it; nothing has changed.
        """
        identity = _identity(event)
        key = identity.key
        if (decision := self._superfluous(identity)) is not None:
            return [decision]
        rollout = self._open.get(identity)
        # A repeat takes no room, so nothing is given up for it.
        grows = rollout is None or not isinstance(event, SamplePart) or rollout.takes(event)
        decisions = self._make_room(resident_size(event, size), identity) if grows else []
        decisions += self._supersede(key, event.attempt)
        if isinstance(event, DpShard) and event.dropped_reason is not None:
            return decisions + self._drop(identity, event.dropped_reason)
        rollout = self._open.get(identity)
        if rollout is None:
            rollout = self._open[identity] = OpenRollout(identity, now)
            self._latest[key] = event.attempt
        before = rollout.resident_bytes
        decisions += self._store(rollout, event, place, size, now)
        rollout.seen_at(place)
        self._resident_bytes += rollout.resident_bytes - before
        return decisions + self._hand_out(rollout)

    def _superfluous(self, identity: RolloutId) -> Stale | Duplicate | None:
        """Returns why no record of this attempt is needed; None if they are."""
        finished, latest = self._finished.get(identity.key), self._latest.get(identity.key)
        current = max((at for at in (finished, latest) if at is not None), default=identity.attempt)
        if identity.attempt < current:
            return Stale(identity, current)
        return Duplicate(identity) if identity.attempt == finished else None

    def _make_room(self, needed: int, identity: RolloutId) -> list[Decision]:
        """Closes rollouts whose incomplete dump is durable, the oldest first, and `identity` itself last."""
        excess = self._resident_bytes + needed - self._max_resident_bytes
        if excess <= 0:
            return []
        kept = [rollout for rollout in self._open.values() if rollout.phase is Phase.INCOMPLETE_DURABLE]
        if sum(rollout.resident_bytes for rollout in kept) < excess:
            raise AssemblerFullError(needed, self._resident_bytes, self._max_resident_bytes, self.open_count)
        decisions: list[Decision] = []
        for rollout in sorted(kept, key=lambda rollout: (rollout.id == identity, rollout.touched_at)):
            if excess <= 0:
                break
            excess -= rollout.resident_bytes
            self._close(rollout.id)
            decisions.append(Evicted(rollout.id))
        return decisions

    def _store(
        self, rollout: OpenRollout, event: SamplePart | DpShard, place: Place, size: int, now: float
    ) -> list[Decision]:
        late: list[Decision] = [Late(rollout.id)] if rollout.was_incomplete else []
        if isinstance(event, SamplePart):
            return late if rollout.add_part(event, place, size, now) else [Duplicate(rollout.id)]
        try:
            if not rollout.add_event(event, place, size, now):
                return [Duplicate(rollout.id)]
        except ConflictError as exc:
            held = rollout.contradicted(exc.rank) if exc.rank is not None else None
            return [Conflict(rollout.id, str(exc), held)]
        beyond = rollout.discard_beyond_events()
        if not beyond:
            return late
        parts, places = zip(*beyond, strict=True)
        return [*late, Discarded(rollout.id, parts, places, "the shard's closing event leaves no room for this slot")]

    def _hand_out(self, rollout: OpenRollout) -> list[Decision]:
        if rollout.phase in _COMPLETE or not rollout.complete:
            return []
        return [Complete(rollout.hand_out(Phase.COMPLETE_HANDED_OUT, next(self._serials)))]

    def _supersede(self, key: RolloutKey, attempt: int) -> list[Decision]:
        latest = self._latest.get(key)
        if latest is None or latest >= attempt:
            return []
        self._latest[key] = attempt
        lower = RolloutId(key.run_id, latest, key.rollout_id, key.stream)
        if self._open[lower].phase in _HANDED_OUT:
            # It is being written: the store replaces it when the higher attempt comes.
            return []
        self._close(lower)
        return [Superseded(lower, attempt)]

    def _drop(self, identity: RolloutId, reason: str) -> list[Decision]:
        rollout = self._open.get(identity)
        if rollout is not None and rollout.phase in _COMPLETE:
            return [Conflict(identity, "a closing event says dropped, but the rollout is complete")]
        self._close(identity)
        self.remember(identity.key, identity.attempt)
        return [Dropped(identity, reason)]

    def _close(self, identity: RolloutId) -> None:
        rollout = self._open.pop(identity, None)
        if rollout is not None:
            self._resident_bytes -= rollout.resident_bytes
        if self._latest.get(identity.key) == identity.attempt:
            del self._latest[identity.key]

    def reject(self, identity: RolloutId, cuts: list[SlotCut]) -> list[Decision]:
        """Takes back a rollout whose slots do not have the announced content; they count as not received.

        Returns:
            `Complete` again if other cuts of the same slots are whole.
        """
        rollout = self._open.get(identity)
        if rollout is None:
            return []
        self._discard(rollout, cuts)
        rollout.phase = Phase.COLLECTING
        if self._latest.get(identity.key) != identity.attempt:
            self._close(identity)
            return []
        return self._hand_out(rollout)

    def _discard(self, rollout: OpenRollout, cuts: Iterable[SlotCut]) -> None:
        before = rollout.resident_bytes
        for cut in cuts:
            rollout.discard(cut)
        self._resident_bytes += rollout.resident_bytes - before

    def put_back(self, rollout: Rollout, *, holds_up_reading: bool) -> bool:
        """Has a rollout that was handed out wait for `hand_out_again`; its records stay, and hold the low watermark.

        Args:
            rollout: whose dump could not be written.
            holds_up_reading: whether that can succeed by itself, so that who needs room may wait for it.

        Returns:
            False if nobody needs its dump.
        """
        held = self._open.get(rollout.id)
        if held is None or held.serial != rollout.serial:
            return False
        if self._latest.get(rollout.id.key) != rollout.id.attempt:
            self._close(rollout.id)
            return False
        complete = held.phase is Phase.COMPLETE_HANDED_OUT
        held.phase = Phase.COMPLETE_WAITING if complete else Phase.INCOMPLETE_WAITING
        held.holds_up_reading = holds_up_reading
        return True

    def hand_out_again(self, identity: RolloutId) -> Rollout | None:
        """Hands out a rollout that was put back, with what came since; None if it does not wait any longer."""
        rollout = self._open.get(identity)
        if rollout is None or rollout.phase not in _WAITING:
            return None
        complete = rollout.phase is Phase.COMPLETE_WAITING
        phase = Phase.COMPLETE_HANDED_OUT if complete else Phase.INCOMPLETE_HANDED_OUT
        return rollout.hand_out(phase, next(self._serials))

    def is_tried(self, identity: RolloutId) -> bool:
        """Returns whether the rollout is handed out or put back now."""
        rollout = self._open.get(identity)
        return rollout is not None and rollout.phase in (*_HANDED_OUT, *_WAITING)

    def finish(self, identity: RolloutId, *, complete: bool, refused: Iterable[SlotCut] = ()) -> None:
        """Notes that what was handed out is durable, so that it holds the low watermark no longer.

        An incomplete rollout stays in memory, without the cuts that were `refused` for their content. What came since
        it was handed out is collected further, and holds the watermark.
        """
        rollout = self._open.get(identity)
        if complete:
            self._close(identity)
            self.remember(identity.key, identity.attempt)
        elif rollout is not None and rollout.phase is Phase.INCOMPLETE_HANDED_OUT:
            self._discard(rollout, refused)
            rollout.incomplete_is_durable()
            if self._latest.get(identity.key) != identity.attempt:
                self._close(identity)

    def overdue(self, now: float) -> list[RolloutId]:
        """Returns the rollouts for which nothing new came for `incomplete_after_s`, those opened first first."""
        return [rollout.id for rollout in self._open.values() if self._is_overdue(rollout, now)]

    def expire(self, now: float) -> list[Incomplete]:
        """Hands out all rollouts that are overdue."""
        return [self._give_up(self._open[identity]) for identity in self.overdue(now)]

    def expire_one(self, identity: RolloutId, now: float) -> Incomplete | None:
        """Hands out a rollout that was overdue; None if something came since, or it is not open any longer."""
        rollout = self._open.get(identity)
        return self._give_up(rollout) if rollout is not None and self._is_overdue(rollout, now) else None

    def _is_overdue(self, rollout: OpenRollout, now: float) -> bool:
        return rollout.phase is Phase.COLLECTING and now - rollout.touched_at >= self._incomplete_after_s

    def _give_up(self, rollout: OpenRollout) -> Incomplete:
        return Incomplete(rollout.hand_out(Phase.INCOMPLETE_HANDED_OUT, next(self._serials)))

    def give_up_oldest(self) -> Incomplete | None:
        """Hands out the rollout that has waited longest for a new record, to make room; None if none is waiting."""
        waiting = [rollout for rollout in self._open.values() if rollout.phase is Phase.COLLECTING]
        if not waiting:
            return None
        return self._give_up(min(waiting, key=lambda rollout: rollout.touched_at))

    def evict_oldest(self) -> Evicted | None:
        """Closes the rollout with a durable incomplete dump that has waited longest; None if there is none."""
        kept = [rollout for rollout in self._open.values() if rollout.phase is Phase.INCOMPLETE_DURABLE]
        if not kept:
            return None
        oldest = min(kept, key=lambda rollout: rollout.touched_at).id
        self._close(oldest)
        return Evicted(oldest)

    def low_watermark(self, partition: int, next_offset: int) -> int:
        """Returns the offset below which nothing of the partition is needed; `next_offset` is the next one to read."""
        needed = (rollout.needed_from.get(partition, next_offset) for rollout in self._open.values())
        return min(needed, default=next_offset)

    def unpin(self, partition: int) -> None:
        """Notes that the partition's log was replaced: what is held of the old one cannot be read again."""
        for rollout in self._open.values():
            rollout.needed_from.pop(partition, None)

    def forget(self, partition: int) -> None:
        """Drops the open rollouts of a partition that another group member reads from now on."""
        for identity in [rollout.id for rollout in self._open.values() if partition in rollout.spans]:
            self._close(identity)


def _identity(event: SamplePart | DpShard) -> RolloutId:
    return RolloutId(event.run_id, event.attempt, event.rollout_id, event.stream)
