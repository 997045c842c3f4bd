"""What the assembler hands out: a rollout with its shards, slots and parts, and what it lacks."""

from dataclasses import dataclass, field

from rollcast.consumer.brief import brief, first_few
from rollcast.schemas import TRAIN_STREAM, DpShard, SamplePart
from rollcast.schemas.sizes import counted


@dataclass(frozen=True, slots=True)
class RolloutKey:
    """What the attempts of one rollout have in common, and what names its dump."""

    run_id: str
    rollout_id: int
    stream: str = TRAIN_STREAM


@dataclass(frozen=True, slots=True)
class RolloutId:
    """One rollout of one attempt of one run."""

    run_id: str
    attempt: int
    rollout_id: int
    stream: str = TRAIN_STREAM

    @property
    def key(self) -> RolloutKey:
        """The same without the attempt."""
        return RolloutKey(self.run_id, self.rollout_id, self.stream)

    def __str__(self) -> str:
        what = "rollout" if self.stream == TRAIN_STREAM else f"{self.stream} call"
        return f"run {brief(self.run_id)!r} attempt {self.attempt} {what} {self.rollout_id}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record stands in the records topic."""

    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class OffsetSpan:
    """Lowest and highest offset of a rollout's records in one partition."""

    partition: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class SlotCut:
    """One slot of a rollout, and into how many parts it was cut."""

    data_parallel_rank: int
    slot: int
    part_count: int


@dataclass(frozen=True, slots=True)
class WholeSlot:
    """All parts of one slot, in order, with the place of each record.

    Attributes:
        cut: which slot, and into how many parts it was cut.
        parts: in order.
        places: of their records.
        rivals: the same slot of other parts, where several came that say different things.
    """

    cut: SlotCut
    parts: tuple[SamplePart, ...]
    places: tuple[Place, ...]
    rivals: tuple["WholeSlot", ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """What is there of one data-parallel shard.

    Attributes:
        data_parallel_rank: its rank.
        event: the closing event; None if it never came.
        event_place: of the closing event's record; None without one.
        slots: its whole slots by slot number, the shard's own (-1) first.
    """

    data_parallel_rank: int
    event: DpShard | None
    event_place: Place | None
    slots: tuple[WholeSlot, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """What an incomplete rollout lacks.

    Attributes:
        shards: ranks without a closing event (only those seen, while the number of shards is unknown).
        shard_count_known: whether any closing event told how many shards there are.
        slots: slots that are not whole, by rank; of shards with a closing event, or with some of the parts.
    """

    shards: tuple[int, ...] = ()
    shard_count_known: bool = True
    slots: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.shards or self.slots or not self.shard_count_known)

    def __str__(self) -> str:
        told = []
        if not self.shard_count_known:
            told.append("the number of shards is unknown")
        if self.shards:
            told.append(f"no closing event of {counted(len(self.shards), 'shard')} ({first_few(self.shards)})")
        if self.slots:
            count = sum(len(slots) for _, slots in self.slots)
            named = first_few(f"{rank}/{slot}" for rank, slots in self.slots for slot in slots)
            told.append(f"{counted(count, 'slot')} not whole (shard/slot {named})")
        return "; ".join(told) or "nothing is missing"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """An assembled rollout.

    Attributes:
        id: which one.
        spans: where its records are; one partition, unless partitions were added in between.
        shards: in data-parallel order.
        missing: empty when every count is met; digests are not checked yet.
        duplicates: records that repeated an identity already held.
        wire_bytes: size of the records held.
        serial: tells what was handed out of one rollout at different times.
    """

    id: RolloutId
    spans: tuple[OffsetSpan, ...]
    shards: tuple[Shard, ...]
    missing: Missing
    duplicates: int
    wire_bytes: int
    serial: int = field(default=0, compare=False)

    @property
    def part_count(self) -> int:
        """Parts of all whole slots."""
        return sum(len(slot.parts) for shard in self.shards for slot in shard.slots)

    @property
    def sample_count(self) -> int:
        """Whole slots that are samples."""
        return sum(slot.cut.slot >= 0 for shard in self.shards for slot in shard.slots)

    @property
    def raw_bytes(self) -> int:
        """Tensor bytes before compression, as the closing events tell it."""
        return sum(shard.event.raw_bytes for shard in self.shards if shard.event is not None)
