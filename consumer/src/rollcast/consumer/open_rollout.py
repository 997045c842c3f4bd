"""A rollout that is not finished: the parts and closing events held so far."""

from collections.abc import Iterable
from dataclasses import replace
from enum import Enum, auto
from itertools import islice, product

from rollcast.consumer.errors import ConflictError, InvalidRecordError
from rollcast.consumer.rivals import same_content
from rollcast.consumer.rollout import Missing, OffsetSpan, Place, Rollout, RolloutId, Shard, SlotCut, WholeSlot
from rollcast.schemas import SHARD_SLOT, DpShard, SamplePart
from rollcast.schemas.joining import PlacedSlice
from rollcast.schemas.sizes import counted

_PART_BYTES = 1024
_COLUMN_BYTES = 600
_VALUE_BYTES = 72
_SLOT_BYTES = 100
# Bounds what somebody can have held, and tried, who sends ever other parts in the name of a shipper.
_MOST_RIVALS = 3
_MOST_CUTS = 3
_MOST_RIVAL_SLOTS = 64

_Held = tuple[SamplePart, Place, int]
"""A part, the place and the size of its record."""


class Phase(Enum):
    """Where an open rollout stands."""

    COLLECTING = auto()
    INCOMPLETE_HANDED_OUT = auto()
    INCOMPLETE_DURABLE = auto()
    INCOMPLETE_WAITING = auto()
    COMPLETE_HANDED_OUT = auto()
    COMPLETE_WAITING = auto()


def resident_size(event: SamplePart | DpShard, size: int) -> int:
    """Returns about how much memory an event takes whose record has this size.

    Objects of small parts, columns, values and digests are far larger than their bytes on the wire; the bytes of placed
    slices are not in memory.
    """
    if isinstance(event, SamplePart):
        elsewhere = sum(column.value.encoded_bytes for column in event.columns if isinstance(column.value, PlacedSlice))
        values = sum(_inner_values(column.value) for column in event.columns)
        own = _PART_BYTES + _COLUMN_BYTES * len(event.columns) + _VALUE_BYTES * values
        return max(0, size - elsewhere) + own
    return size + _PART_BYTES + _SLOT_BYTES * len(event.slot_digests)


def _inner_values(value: object) -> int:
    if isinstance(value, dict):
        return 2 * len(value) + sum(map(_inner_values, value.values()))
    return len(value) + sum(map(_inner_values, value)) if isinstance(value, (list, tuple)) else 0


class OpenRollout:
    """Parts and closing events of one rollout, and when it is whole.

    Attributes:
        id: which rollout.
        spans: lowest and highest offset seen, by partition.
        needed_from: lowest offset, by partition, of a record that no durable dump has.
        resident_bytes: memory that the records held take, about.
        opened_at: when the first record came.
        touched_at: when the last record that was not a repeat came.
        duplicates: repeats seen.
        phase: whether it was handed out, and if so, whether its dump is durable or waits for another try.
        holds_up_reading: whether reading may wait for that try to succeed.
        was_incomplete: whether it was ever handed out as incomplete.
        serial: of what was handed out last.
    """

    def __init__(self, rollout_id: RolloutId, now: float) -> None:
        self.id = rollout_id
        self.spans: dict[int, tuple[int, int]] = {}
        self.needed_from: dict[int, int] = {}
        self.opened_at = self.touched_at = now
        self.resident_bytes = self.duplicates = 0
        self.phase = Phase.COLLECTING
        self.holds_up_reading = False
        self.was_incomplete = False
        self.serial = 0
        self._wire_bytes = 0
        self._news_since_snapshot = False
        self._events: dict[int, tuple[DpShard, Place]] = {}
        self._cuts: dict[tuple[int, int], dict[int, dict[int, _Held]]] = {}
        # Made as soon as a slot is whole, so that handing out thousands of them does not hold up the event loop.
        self._whole: dict[tuple[int, int], WholeSlot] = {}
        # Parts that say something else than one that came before with their identity, by slot and cut.
        self._rivals: dict[tuple[int, int, int], list[_Held]] = {}
        self._rivals_seen: dict[tuple[int, int, int], int] = {}
        self._contradicted: set[int] = set()
        self._shard_count: int | None = None
        self._slots_expected = 0

    def seen_at(self, place: Place) -> None:
        """Notes the place of one of its records."""
        first, last = self.spans.get(place.partition, (place.offset, place.offset))
        self.spans[place.partition] = (min(first, place.offset), max(last, place.offset))

    def lacks(self, part: SamplePart) -> bool:
        """Returns whether no part with this identity is held, and there is a place for it."""
        key = (part.data_parallel_rank, part.slot)
        cuts = self._cuts.get(key, {})
        if part.part in cuts.get(part.part_count, {}) or not self._has_room_for(*key):
            return False
        # Whoever wrote the whole cut may have forged it.
        return key not in self._whole or part.part_count in cuts or len(cuts) < _MOST_CUTS

    def takes(self, part: SamplePart) -> bool:
        """Returns whether the part would be held: it is new, or says something new."""
        if self.lacks(part):
            return True
        rivals = self.rivals_of(part)
        return bool(rivals) and not any(same_content(held, part) for held in rivals)

    def rivals_of(self, part: SamplePart) -> list[SamplePart]:
        """Returns the parts held with its identity; none if they are as many as may be."""
        slot = (part.data_parallel_rank, part.slot)
        cut = self._cuts.get(slot, {}).get(part.part_count, {})
        if part.part not in cut:
            return []
        others = self._rivals.get((*slot, part.part_count), ())
        held = [cut[part.part][0], *(other for other, _, _ in others if other.part == part.part)]
        return held if len(held) <= _MOST_RIVALS else []

    def add_part(self, part: SamplePart, place: Place, size: int, now: float) -> bool:
        """Returns whether the part is held now: it was new, or says something new.

        Raises:
            InvalidRecordError: its slot or rank is beyond what a closing event announced.
        """
        key = (part.data_parallel_rank, part.slot)
        if self._shard_count is not None and part.data_parallel_rank >= self._shard_count:
            shards = counted(self._shard_count, "shard")
            raise InvalidRecordError(f"data_parallel_rank is {part.data_parallel_rank} of {shards}")
        held = self._events.get(part.data_parallel_rank)
        if held is not None and part.slot >= held[0].sample_count:
            raise InvalidRecordError(f"slot is {part.slot} of {counted(held[0].sample_count, 'sample')}")
        if not self.takes(part):
            self.duplicates += 1
            return False
        cut = self._cuts.setdefault(key, {}).setdefault(part.part_count, {})
        if part.part in cut:
            self._rivals.setdefault((*key, part.part_count), []).append((part, place, size))
        else:
            cut[part.part] = (part, place, size)
            if len(cut) == part.part_count and key not in self._whole:
                self._whole[key] = _whole_slot(*key, cut)
        self._grew(part, place, size, now)
        return True

    def add_event(self, event: DpShard, place: Place, size: int, now: float) -> bool:
        """Returns whether the closing event was new.

        Raises:
            ConflictError: it contradicts one that is held.
        """
        held = self._events.get(event.data_parallel_rank)
        if held is not None:
            if _content(held[0]) != _content(event):
                rank = event.data_parallel_rank
                raise ConflictError(f"a second closing event of shard {rank} has other content", rank)
            self.duplicates += 1
            return False
        if self._shard_count not in (None, event.data_parallel_size):
            raise ConflictError(
                f"the closing event of shard {event.data_parallel_rank} tells of "
                f"{counted(event.data_parallel_size, 'shard')}, an earlier one of {self._shard_count}"
            )
        self._shard_count = event.data_parallel_size
        self._slots_expected += event.sample_count + 1
        self._events[event.data_parallel_rank] = (event, place)
        self._grew(event, place, size, now)
        return True

    def contradicted(self, rank: int) -> tuple[DpShard, Place] | None:
        """Returns the closing event of the rank, the first time that it is contradicted."""
        if rank in self._contradicted:
            return None
        self._contradicted.add(rank)
        return self._events[rank]

    def _grew(self, event: SamplePart | DpShard, place: Place, size: int, now: float) -> None:
        self._wire_bytes += size
        self.resident_bytes += resident_size(event, size)
        self.touched_at = now
        self.needed_from[place.partition] = min(place.offset, self.needed_from.get(place.partition, place.offset))
        self._news_since_snapshot = True
        if self.phase is Phase.INCOMPLETE_DURABLE:
            self.phase = Phase.COLLECTING

    def incomplete_is_durable(self) -> None:
        """Notes that the incomplete snapshot is kept; what came after it is collected further."""
        if self._news_since_snapshot:
            self.phase = Phase.COLLECTING
            return
        self.phase = Phase.INCOMPLETE_DURABLE
        self.needed_from.clear()

    def discard_beyond_events(self) -> list[tuple[SamplePart, Place]]:
        """Removes the parts that no closing event leaves room for; returns them with their places."""
        beyond = [key for key in self._cuts if not self._has_room_for(*key)]
        return [part for key in beyond for part in self._remove(key, self._cuts[key])]

    def discard(self, cut: SlotCut) -> None:
        """Removes the parts of one cut of one slot, whose content is bad; unless one has come that may be the right."""
        key = (cut.data_parallel_rank, cut.slot)
        rivals = len(self._rivals.get((*key, cut.part_count), ()))
        seen = self._rivals_seen.get((*key, cut.part_count), 0)
        if cut.part_count in self._cuts.get(key, {}) and rivals == seen:
            self._remove(key, (cut.part_count,))

    def _has_room_for(self, rank: int, slot: int) -> bool:
        if self._shard_count is not None and rank >= self._shard_count:
            return False
        return rank not in self._events or slot < self._events[rank][0].sample_count

    def _remove(self, key: tuple[int, int], part_counts: Iterable[int]) -> list[tuple[SamplePart, Place]]:
        removed: list[_Held] = []
        for part_count in tuple(part_counts):
            removed += self._cuts[key].pop(part_count).values()
            removed += self._rivals.pop((*key, part_count), ())
            self._rivals_seen.pop((*key, part_count), None)
        self._wire_bytes -= sum(size for _, _, size in removed)
        self.resident_bytes -= sum(resident_size(part, size) for part, _, size in removed)
        self._whole.pop(key, None)
        for part_count, cut in self._cuts[key].items():
            if len(cut) == part_count and key not in self._whole:
                self._whole[key] = _whole_slot(*key, cut)
        if not self._cuts[key]:
            del self._cuts[key]
        return [(part, place) for part, place, _ in removed]

    @property
    def complete(self) -> bool:
        """Whether every shard's closing event and every part of every slot is there."""
        return len(self._events) == self._shard_count and len(self._whole) == self._slots_expected

    def hand_out(self, phase: Phase, serial: int) -> Rollout:
        """Returns what is there, and what is missing; the rollout is in that phase from now on."""
        self.phase, self.serial = phase, serial
        self.was_incomplete |= phase is Phase.INCOMPLETE_HANDED_OUT
        self._news_since_snapshot = False
        slots: dict[int, list[WholeSlot]] = {}
        broken: dict[int, list[int]] = {}
        for key in sorted(self._cuts):
            rank, slot = key
            if key in self._whole:
                slots.setdefault(rank, []).append(self._with_rivals(key))
            else:
                broken.setdefault(rank, []).append(slot)
        seen = sorted({*self._events, *slots})
        return Rollout(
            id=self.id,
            spans=tuple(OffsetSpan(partition, *span) for partition, span in sorted(self.spans.items())),
            shards=tuple(self._shard(rank, slots.get(rank, [])) for rank in seen),
            missing=self._missing(broken),
            duplicates=self.duplicates,
            wire_bytes=self._wire_bytes,
            serial=serial,
        )

    def _with_rivals(self, key: tuple[int, int]) -> WholeSlot:
        whole, cuts = self._whole[key], self._cuts[key]
        if len(cuts) == 1 and (*key, whole.cut.part_count) not in self._rivals:
            return whole
        rivals: list[WholeSlot] = []
        for part_count, cut in cuts.items():
            if len(cut) < part_count:
                continue
            others = self._rivals.get((*key, part_count), [])
            self._rivals_seen[(*key, part_count)] = len(others)
            choices = [[cut[part]] for part in range(part_count)]
            for held in others:
                choices[held[0].part].append(held)
            chosen = islice(product(*choices), _MOST_RIVAL_SLOTS)
            rivals += (_whole_slot(*key, dict(enumerate(each))) for each in chosen)
        return replace(whole, rivals=tuple(each for each in rivals if each.places != whole.places))

    def _shard(self, rank: int, slots: list[WholeSlot]) -> Shard:
        event, place = self._events.get(rank, (None, None))
        return Shard(data_parallel_rank=rank, event=event, event_place=place, slots=tuple(slots))

    def _missing(self, broken: dict[int, list[int]]) -> Missing:
        missing_slots = dict(broken)
        for rank, (event, _) in self._events.items():
            absent = [slot for slot in range(SHARD_SLOT, event.sample_count) if (rank, slot) not in self._whole]
            missing_slots[rank] = absent
        ranks = range(self._shard_count) if self._shard_count is not None else sorted({rank for rank, _ in self._cuts})
        return Missing(
            shards=tuple(rank for rank in ranks if rank not in self._events),
            shard_count_known=self._shard_count is not None,
            slots=tuple((rank, tuple(absent)) for rank, absent in sorted(missing_slots.items()) if absent),
        )


def _whole_slot(rank: int, slot: int, cut: dict[int, _Held]) -> WholeSlot:
    held = [cut[part] for part in range(len(cut))]
    parts, places, _ = zip(*held, strict=True)
    return WholeSlot(SlotCut(rank, slot, len(cut)), parts, places)


def _content(event: DpShard) -> DpShard:
    # When it was sent and how the slots were cut differ between two shipments of the same bundle.
    return replace(event, published_at_ms=0, part_counts=())
