"""Puts rollouts together from records in any order; pure: no I/O, no clock, no torch."""

from collections import OrderedDict

from rollcast.consumer.decisions import (
    Complete,
    Conflict,
    Decision,
    Discarded,
    Dropped,
    Duplicate,
    Incomplete,
    Stale,
    Superseded,
)
from rollcast.consumer.errors import AssemblerFullError
from rollcast.consumer.open_rollout import ConflictError, OpenRollout, Phase
from rollcast.consumer.rollout import Place, RolloutId, RolloutKey, SlotCut
from rollcast.consumer.validity import check_event
from rollcast.schemas import DEFAULT_LIMITS, DpShard, Limits, SamplePart

_REMEMBERED_ROLLOUTS = 65_536


class Assembler:
    """Records in, decisions out; counts alone decide what is complete, never order or time.

    A rollout that was handed out (`Complete`, `Incomplete`) stays open, and holds the low watermark, until `finish`
    says that it is durable. Finished rollouts are remembered for as long as there is room; whoever reads a topic
    again asks its store about a rollout that `knows` denies, and tells `remember`.

    Args:
        incomplete_after_s: a rollout without a new record for so long is handed out as `Incomplete`.
        max_resident_bytes: cap on the records held.
        limits: caps on what a record may claim.
    """

    def __init__(self, *, incomplete_after_s: float, max_resident_bytes: int, limits: Limits = DEFAULT_LIMITS) -> None:
        self._incomplete_after_s = incomplete_after_s
        self._max_resident_bytes = max_resident_bytes
        self._limits = limits
        self._open: dict[RolloutId, OpenRollout] = {}
        self._latest: dict[RolloutKey, int] = {}
        self._finished: OrderedDict[RolloutKey, int] = OrderedDict()
        self._resident_bytes = 0

    @property
    def open_count(self) -> int:
        """Rollouts that are not finished."""
        return len(self._open)

    @property
    def resident_bytes(self) -> int:
        """Size of the records held."""
        return self._resident_bytes

    def knows(self, key: RolloutKey) -> bool:
        """Returns whether the rollout is open or remembered as finished."""
        return key in self._latest or key in self._finished

    def holds(self, identity: RolloutId) -> bool:
        """Returns whether this attempt of the rollout is open, handed out or not."""
        return identity in self._open

    def remember(self, key: RolloutKey, attempt: int) -> None:
        """Notes that this attempt of the rollout is finished: its records, and those of lower ones, are not needed."""
        self._finished[key] = max(attempt, self._finished.get(key, attempt))
        self._finished.move_to_end(key)
        if len(self._finished) > _REMEMBERED_ROLLOUTS:
            self._finished.popitem(last=False)

    def add(self, event: SamplePart | DpShard, place: Place, *, size: int, now: float) -> list[Decision]:
        """Takes one record and returns what follows from it; nothing, where it is merely one more piece.

        Raises:
            InvalidRecordError: the record contradicts itself or a closing event; nothing has changed.
            AssemblerFullError: there is no room for it; nothing has changed.
        """
        check_event(event, self._limits)
        identity = RolloutId(event.run_id, event.attempt, event.rollout_id, event.stream)
        key = identity.key
        finished = self._finished.get(key)
        current = max((at for at in (finished, self._latest.get(key)) if at is not None), default=event.attempt)
        if event.attempt < current:
            return [Stale(identity, current)]
        if event.attempt == finished:
            return [Duplicate(identity)]
        if self._resident_bytes + size > self._max_resident_bytes:
            raise AssemblerFullError(self._resident_bytes, self._max_resident_bytes, len(self._open))
        decisions = self._supersede(key, event.attempt)
        if isinstance(event, DpShard) and event.dropped_reason is not None:
            return decisions + self._drop(identity, event.dropped_reason)
        rollout = self._open.get(identity)
        if rollout is None:
            rollout = self._open[identity] = OpenRollout(identity, now)
            self._latest[key] = event.attempt
        before = rollout.held_bytes
        decisions += self._store(rollout, event, place, size, now)
        rollout.seen_at(place)
        self._resident_bytes += rollout.held_bytes - before
        return decisions + self._hand_out(rollout)

    def _store(
        self, rollout: OpenRollout, event: SamplePart | DpShard, place: Place, size: int, now: float
    ) -> list[Decision]:
        if isinstance(event, SamplePart):
            return [] if rollout.add_part(event, place, size, now) else [Duplicate(rollout.id)]
        try:
            if not rollout.add_event(event, place, size, now):
                return [Duplicate(rollout.id)]
        except ConflictError as exc:
            return [Conflict(rollout.id, str(exc))]
        beyond = rollout.discard_beyond_events()
        if not beyond:
            return []
        parts, places = zip(*beyond, strict=True)
        return [Discarded(rollout.id, parts, places, "the shard's closing event leaves no room for this slot")]

    def _hand_out(self, rollout: OpenRollout) -> list[Decision]:
        if rollout.phase is Phase.COMPLETE_HANDED_OUT or not rollout.complete:
            return []
        rollout.phase = Phase.COMPLETE_HANDED_OUT
        return [Complete(rollout.snapshot())]

    def _supersede(self, key: RolloutKey, attempt: int) -> list[Decision]:
        latest = self._latest.get(key)
        if latest is None or latest >= attempt:
            return []
        self._latest[key] = attempt
        lower = RolloutId(key.run_id, latest, key.rollout_id, key.stream)
        if self._open[lower].phase is not Phase.COLLECTING:
            # It is being written: the store replaces it when the higher attempt comes.
            return []
        self._close(lower)
        return [Superseded(lower, attempt)]

    def _drop(self, identity: RolloutId, reason: str) -> list[Decision]:
        rollout = self._open.get(identity)
        if rollout is not None and rollout.phase is Phase.COMPLETE_HANDED_OUT:
            return [Conflict(identity, "a closing event says dropped, but the rollout is complete")]
        self._close(identity)
        self.remember(identity.key, identity.attempt)
        return [Dropped(identity, reason)]

    def _close(self, identity: RolloutId) -> None:
        rollout = self._open.pop(identity, None)
        if rollout is not None:
            self._resident_bytes -= rollout.held_bytes
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
        before = rollout.held_bytes
        for cut in cuts:
            rollout.discard(cut)
        self._resident_bytes += rollout.held_bytes - before
        rollout.phase = Phase.COLLECTING
        if self._latest[identity.key] != identity.attempt:
            self._close(identity)
            return []
        return self._hand_out(rollout)

    def finish(self, identity: RolloutId, *, complete: bool) -> None:
        """Notes that what was handed out is durable, so that it holds the low watermark no longer.

        An incomplete rollout is not remembered: should all its records come again, it becomes complete.
        """
        rollout = self._open.get(identity)
        if complete:
            self._close(identity)
            self.remember(identity.key, identity.attempt)
        elif rollout is not None and rollout.phase is Phase.INCOMPLETE_HANDED_OUT:
            self._close(identity)

    def expire(self, now: float) -> list[Incomplete]:
        """Hands out the rollouts for which nothing new came for `incomplete_after_s`."""
        expired = [
            rollout
            for rollout in self._open.values()
            if rollout.phase is Phase.COLLECTING and now - rollout.touched_at >= self._incomplete_after_s
        ]
        for rollout in expired:
            rollout.phase = Phase.INCOMPLETE_HANDED_OUT
        return [Incomplete(rollout.snapshot()) for rollout in expired]

    def low_watermark(self, partition: int, next_offset: int) -> int:
        """Returns the offset below which nothing of the partition is needed; `next_offset` is the next one to read."""
        first = (rollout.spans[partition][0] for rollout in self._open.values() if partition in rollout.spans)
        return min(first, default=next_offset)

    def forget(self, partition: int) -> None:
        """Drops the open rollouts of a partition that another group member reads from now on."""
        for identity in [rollout.id for rollout in self._open.values() if partition in rollout.spans]:
            self._close(identity)
