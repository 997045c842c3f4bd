"""The assembler against a simple model: random records, attempts, publishing, restarts and rebalances."""

import random
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field, replace
from math import prod

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rollcast.consumer.assembler import Assembler
from rollcast.consumer.decisions import (
    Complete,
    Conflict,
    Decision,
    Discarded,
    Dropped,
    Duplicate,
    Evicted,
    Late,
    Stale,
    Superseded,
)
from rollcast.consumer.errors import AssemblerFullError, InvalidRecordError
from rollcast.consumer.open_rollout import resident_size
from rollcast.consumer.rollout import Place, Rollout, RolloutId, RolloutKey, SlotCut, WholeSlot
from rollcast.schemas import SHARD_SLOT, Column, DpShard, SamplePart

Event = SamplePart | DpShard
Slot = tuple[int, int]
Piece = tuple[int, int, int, int, bool] | int

SIZE = 100
EXPIRE_S = 10.0
RUNS, ROLLOUTS, ATTEMPTS = ("a", "b"), (0, 1, 2), (1, 2, 3)
STEPS: Counter[str] = Counter()


def shape(rollout_id: int, attempt: int) -> list[int]:
    """Samples of each shard of a rollout: another number in every attempt."""
    return [[1], [2, 0], [1, 1]][(rollout_id + attempt) % 3]


def sent_by(run_id: str, rollout_id: int, attempt: int, part_count: int) -> list[Event]:
    """What a shipper sends of a rollout when it cuts every slot into so many parts."""
    sent: list[Event] = []
    samples = shape(rollout_id, attempt)
    for rank, count in enumerate(samples):
        sent += [
            SamplePart(
                run_id=run_id,
                attempt=attempt,
                rollout_id=rollout_id,
                data_parallel_rank=rank,
                slot=slot,
                rollout_position=None,
                sample_index=None,
                part=part,
                part_count=part_count,
                columns=(),
            )
            for slot in range(SHARD_SLOT, count)
            for part in range(part_count)
        ]
        sent.append(
            DpShard(
                run_id=run_id,
                attempt=attempt,
                rollout_id=rollout_id,
                data_parallel_rank=rank,
                data_parallel_size=len(samples),
                rank=rank,
                tensor_parallel_size=1,
                pipeline_parallel_size=1,
                context_parallel_size=1,
                context_parallel_layout="none",
                sample_count=count,
                slot_digests=(b"d" * 16,) * (count + 1),
                part_counts=(part_count,) * (count + 1),
                raw_bytes=0,
                replaced_values=0,
                dropped_reason=None,
                published_at_ms=0,
            )
        )
    return sent


BAD = (Column("bad", 0, None),)


def is_bad(part: SamplePart) -> bool:
    """Stands for content without the announced digest."""
    return part.columns == BAD


def id_of(event: Event) -> RolloutId:
    return RolloutId(event.run_id, event.attempt, event.rollout_id)


def partition_of(event: Event) -> int:
    return event.rollout_id % 2


def piece_of(event: Event) -> Piece:
    if isinstance(event, DpShard):
        return event.data_parallel_rank
    return event.data_parallel_rank, event.slot, event.part_count, event.part, is_bad(event)


@dataclass
class Model:
    """What is known of one open rollout: the records held, and those that no durable dump has."""

    held: dict[Piece, Event] = field(default_factory=dict)
    needed: dict[Piece, int] = field(default_factory=dict)
    touched_at: float = 0.0
    state: str = "collecting"
    was_incomplete: bool = False

    def cuts(self) -> dict[Slot, dict[int, list[SamplePart]]]:
        found: dict[Slot, dict[int, list[SamplePart]]] = defaultdict(lambda: defaultdict(list))
        for event in self.held.values():
            if isinstance(event, SamplePart):
                found[event.data_parallel_rank, event.slot][event.part_count].append(event)
        return found

    def whole(self) -> dict[Slot, list[list[SamplePart]]]:
        """Returns the parts of each cut of each slot of which every part is there, in one content or in several."""
        found: dict[Slot, list[list[SamplePart]]] = defaultdict(list)
        for slot, cuts in self.cuts().items():
            for part_count, parts in cuts.items():
                if len({part.part for part in parts}) == part_count:
                    found[slot].append(parts)
        return found

    def closing(self) -> dict[int, DpShard]:
        return {event.data_parallel_rank: event for event in self.held.values() if isinstance(event, DpShard)}

    def has_room_for(self, rank: int, slot: int) -> bool:
        closing = self.closing()
        sizes = {event.data_parallel_size for event in closing.values()}
        return all(rank < size for size in sizes) and (rank not in closing or slot < closing[rank].sample_count)

    def complete(self) -> bool:
        closing = self.closing()
        expected = {(rank, slot) for rank, event in closing.items() for slot in range(SHARD_SLOT, event.sample_count)}
        return (
            bool(closing)
            and all(len(closing) == event.data_parallel_size for event in closing.values())
            and self.whole().keys() == expected
        )

    def remove(self, pieces: set[Piece]) -> None:
        for piece in pieces:
            del self.held[piece]
            self.needed.pop(piece, None)


class AssemblerMachine(RuleBasedStateMachine):
    """A topic of two partitions, one reader with an assembler, and a store; each can stop and start again."""

    def __init__(self) -> None:
        super().__init__()
        self.topic: dict[int, list[Event]] = {0: [], 1: []}
        self.committed = {0: 0, 1: 0}
        self.store: dict[RolloutKey, int] = {}
        self.spoilt: set[RolloutId] = set()
        self.now = 0.0
        self.cap = 10**9
        self.start()

    def start(self) -> None:
        self.assembler = Assembler(incomplete_after_s=EXPIRE_S, max_resident_bytes=self.cap)
        self.cursor = dict(self.committed)
        self.models: dict[RolloutId, Model] = {}
        self.latest: dict[RolloutKey, int] = {}
        self.finished: dict[RolloutKey, int] = {}
        self.handed_out: deque[Rollout] = deque()
        self.completed: set[RolloutId] = set()

    @initialize(cap=st.sampled_from([10**9, 40_000]))
    def choose_cap(self, cap: int) -> None:
        self.cap = cap
        self.start()

    # What producers do.

    @rule(
        run_id=st.sampled_from(RUNS),
        rollout_id=st.sampled_from(ROLLOUTS),
        attempt=st.sampled_from(ATTEMPTS),
        part_count=st.integers(1, 2),
        order=st.randoms(use_true_random=False),
        share=st.sampled_from([0.2, 0.7, 1.0]),
        spoil=st.sampled_from([False, False, True]),
    )
    def send(
        self,
        run_id: str,
        rollout_id: int,
        attempt: int,
        part_count: int,
        order: random.Random,
        share: float,
        spoil: bool,
    ) -> None:
        events = sent_by(run_id, rollout_id, attempt, part_count)
        order.shuffle(events)
        if spoil:
            events = [replace(event, columns=BAD) if isinstance(event, SamplePart) else event for event in events]
        for event in events[: max(1, round(share * len(events)))]:
            self.topic[partition_of(event)].append(event)

    @rule(data=st.data(), kind=st.sampled_from(["bad", "repeat", "conflict", "beyond", "more shards", "drop"]))
    def send_something_odd(self, data: st.DataObject, kind: str) -> None:
        run_id, rollout_id = data.draw(st.sampled_from(RUNS)), data.draw(st.sampled_from(ROLLOUTS))
        attempt, part_count = data.draw(st.sampled_from(ATTEMPTS)), data.draw(st.integers(1, 2))
        event = data.draw(st.sampled_from(sent_by(run_id, rollout_id, attempt, part_count)))
        if isinstance(event, SamplePart) and kind == "bad":
            event = replace(event, columns=BAD)
        elif isinstance(event, SamplePart) and kind == "beyond":
            event = replace(event, slot=event.slot + 2, data_parallel_rank=data.draw(st.integers(0, 3)))
        elif isinstance(event, DpShard) and kind == "conflict":
            event = replace(event, raw_bytes=1)
        elif isinstance(event, DpShard) and kind == "more shards" and event.data_parallel_rank:
            # Whoever comes first is believed, so with this one the others may never fit.
            event = replace(event, data_parallel_size=3)
            self.spoilt.add(id_of(event))
        elif isinstance(event, DpShard) and kind == "drop":
            event = replace(event, dropped_reason="full", slot_digests=(), part_counts=(), sample_count=0)
            self.spoilt.add(id_of(event))
        self.topic[partition_of(event)].append(event)

    # What the daemon does.

    @rule(partition=st.integers(0, 1), count=st.integers(1, 12))
    def read(self, partition: int, count: int) -> None:
        for event in self.topic[partition][self.cursor[partition] :][:count]:
            self.take(partition, event)

    def take(self, partition: int, event: Event) -> None:
        STEPS["records"] += 1
        key = id_of(event).key
        if not self.assembler.knows(key) and key in self.store:
            self.assembler.remember(key, self.store[key])
            self.finished[key] = self.store[key]
        place = Place(partition, self.cursor[partition])
        while True:
            wanted = isinstance(event, SamplePart) and self.assembler.wants(event)
            compared = isinstance(event, SamplePart) and bool(self.assembler.rivals_of(event))
            twin = isinstance(event, SamplePart) and self.has_twin(event)
            expected = self.expected(event)
            try:
                decisions = self.assembler.add(event, place, size=SIZE, now=self.now)
            except AssemblerFullError:
                self.make_room()
                continue
            except InvalidRecordError:
                assert expected == "invalid"
                decisions = []
            break
        for decision in decisions:
            if isinstance(decision, Evicted):
                self.note_evicted(decision)
        if isinstance(event, SamplePart):
            assert wanted == (expected == "held" and not compared)
            assert compared == twin
        self.note_taken(event, expected, [each for each in decisions if not isinstance(each, Evicted)], place)
        self.cursor[partition] += 1

    def make_room(self) -> None:
        self.try_again()
        if not self.assembler.awaits_finish:
            given_up = self.assembler.give_up_oldest()
            assert given_up is not None
            self.note_incomplete(given_up.rollout)
        while self.handed_out:
            self.publish()

    def expected(self, event: Event) -> str:
        """Returns what the model makes of a record."""
        identity = id_of(event)
        finished, latest = self.finished.get(identity.key, 0), self.latest.get(identity.key, 0)
        if event.attempt < max(finished, latest):
            return "stale"
        if event.attempt == finished:
            return "duplicate"
        model = self.models.get(identity, Model())
        if isinstance(event, SamplePart):
            if not model.has_room_for(event.data_parallel_rank, event.slot):
                return "invalid"
            return "duplicate" if piece_of(event) in model.held else "held"
        if event.dropped_reason is not None:
            return "conflict" if model.state.startswith("complete") else "dropped"
        held = model.closing()
        if event.data_parallel_rank in held:
            return "duplicate" if same(held[event.data_parallel_rank], event) else "conflict"
        sizes = {other.data_parallel_size for other in held.values()}
        return "held" if sizes <= {event.data_parallel_size} else "conflict"

    def has_twin(self, event: SamplePart) -> bool:
        """Returns whether a part with its identity is held, whatever it says, and may be the wrong one."""
        held = self.models.get(id_of(event), Model()).held
        return self.expected(event) in ("held", "duplicate") and any(
            piece_of(replace(event, columns=columns)) in held for columns in ((), BAD)
        )

    def note_taken(self, event: Event, expected: str, decisions: list[Decision], place: Place) -> None:
        identity = id_of(event)
        kinds = Counter(type(decision) for decision in decisions)
        assert kinds[Stale] == (expected == "stale")
        assert kinds[Duplicate] == (expected == "duplicate")
        assert kinds[Conflict] == (expected == "conflict")
        assert kinds[Dropped] == (expected == "dropped")
        if expected in ("stale", "duplicate") and event.attempt <= self.finished.get(identity.key, 0):
            return
        if expected == "stale":
            return
        self.note_superseded(identity, kinds[Superseded])
        if expected == "dropped":
            self.models.pop(identity, None)
            self.latest.pop(identity.key, None)
            self.finished[identity.key] = event.attempt
            return
        self.latest[identity.key] = event.attempt
        model = self.models.setdefault(identity, Model(touched_at=self.now))
        if expected == "held":
            assert kinds[Late] == model.was_incomplete
            model.held[piece_of(event)] = event
            model.needed[piece_of(event)] = place.offset
            model.touched_at = self.now
            if model.state == "incomplete durable":
                model.state = "collecting"
        beyond = {
            piece
            for piece, part in model.held.items()
            if isinstance(part, SamplePart) and not model.has_room_for(part.data_parallel_rank, part.slot)
        }
        discarded = {piece_of(part) for each in decisions if isinstance(each, Discarded) for part in each.parts}
        assert discarded == beyond
        model.remove(beyond)
        self.note_complete(identity, decisions)

    def note_superseded(self, identity: RolloutId, told: int) -> None:
        lower = self.latest.get(identity.key, identity.attempt)
        if lower >= identity.attempt:
            assert not told
            return
        superseded = replace(identity, attempt=lower)
        if self.models[superseded].state.endswith("handed out"):
            assert not told
            return
        assert told == 1
        del self.models[superseded]

    def note_complete(self, identity: RolloutId, decisions: list[Decision]) -> None:
        completed = [decision.rollout for decision in decisions if isinstance(decision, Complete)]
        model = self.models[identity]
        assert len(completed) == (model.complete() and not model.state.startswith("complete"))
        for rollout in completed:
            assert rollout.id == identity
            assert identity not in self.completed
            self.completed.add(identity)
            assert not rollout.missing
            assert {shard.data_parallel_rank: shard.event for shard in rollout.shards} == model.closing()
            self.check_slots(rollout, model)
            model.state = "complete handed out"
            self.handed_out.append(rollout)

    def check_slots(self, rollout: Rollout, model: Model) -> None:
        handed_out = {
            (slot.cut.data_parallel_rank, slot.cut.slot): slot for shard in rollout.shards for slot in shard.slots
        }
        whole = model.whole()
        assert handed_out.keys() == whole.keys()
        for place, slot in handed_out.items():
            # Every way to fill the slot, each once.
            ways = [list(each.parts) for each in (slot, *slot.rivals)]
            assert len(ways) == len({tuple(map(id, way)) for way in ways})
            assert len(ways) == sum(prod(Counter(part.part for part in parts).values()) for parts in whole[place])
            for way in ways:
                assert [part.part for part in way] == list(range(way[0].part_count))
                assert any(all(part in parts for part in way) for parts in whole[place])

    def note_incomplete(self, rollout: Rollout) -> None:
        model = self.models[rollout.id]
        assert model.state == "collecting"
        self.check_slots(rollout, model)
        model.state, model.was_incomplete = "incomplete handed out", True
        self.handed_out.append(rollout)

    def note_evicted(self, evicted: Evicted) -> None:
        assert self.models.pop(evicted.rollout_id).state == "incomplete durable"
        del self.latest[evicted.rollout_id.key]
        self.completed.discard(evicted.rollout_id)

    @rule(seconds=st.sampled_from([0.1, 4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        due = {
            identity
            for identity, model in self.models.items()
            if model.state == "collecting" and self.now - model.touched_at >= EXPIRE_S
        }
        expired = [incomplete.rollout for incomplete in self.assembler.expire(self.now)]
        assert {rollout.id for rollout in expired} == due
        for rollout in expired:
            self.note_incomplete(rollout)

    @rule()
    def give_up_the_oldest(self) -> None:
        waiting = [model.touched_at for model in self.models.values() if model.state == "collecting"]
        given_up = self.assembler.give_up_oldest()
        assert (given_up is None) == (not waiting)
        if given_up is not None:
            assert self.models[given_up.rollout.id].touched_at == min(waiting)
            self.note_incomplete(given_up.rollout)

    @rule()
    def evict_the_oldest(self) -> None:
        evicted = self.assembler.evict_oldest()
        durable = any(model.state == "incomplete durable" for model in self.models.values())
        assert (evicted is not None) == durable
        if evicted is not None:
            self.note_evicted(evicted)

    @precondition(lambda self: self.handed_out)
    @rule()
    def publish(self) -> None:
        STEPS["published"] += 1
        rollout = self.handed_out.popleft()
        if not self.assembler.awaits(rollout):
            return
        model = self.models[rollout.id]
        slots = [slot for shard in rollout.shards for slot in shard.slots]
        bad = [slot for slot in slots if all(any(map(is_bad, each.parts)) for each in (slot, *slot.rivals))]
        cuts = [each.cut for slot in bad for each in (slot, *slot.rivals)]
        STEPS["settled"] += sum(any(map(is_bad, slot.parts)) for slot in slots) - len(bad)
        if bad and not rollout.missing:
            STEPS["rejected"] += 1
            self.completed.discard(rollout.id)
            decisions = self.assembler.reject(rollout.id, cuts)
            self.forget_cuts(model, cuts, slots)
            model.state = "collecting"
            if self.latest.get(rollout.id.key) != rollout.id.attempt:
                del self.models[rollout.id]
                assert decisions == []
            else:
                self.note_complete(rollout.id, decisions)
            return
        self.assembler.finish(rollout.id, complete=not rollout.missing, refused=cuts)
        if not rollout.missing:
            STEPS["complete"] += 1
            self.store[rollout.id.key] = max(rollout.id.attempt, self.store.get(rollout.id.key, 0))
            self.close(rollout.id)
            self.finished[rollout.id.key] = max(rollout.id.attempt, self.finished.get(rollout.id.key, 0))
            return
        STEPS["incomplete"] += 1
        if model.state == "complete handed out":
            return
        self.forget_cuts(model, cuts, slots)
        written = {piece_of(part) for slot in slots for part in slot.parts} | {
            shard.data_parallel_rank for shard in rollout.shards if shard.event is not None
        }
        broken = {piece for piece in model.needed if piece not in written and self.snapshot_saw(rollout, model, piece)}
        for piece in written | broken:
            model.needed.pop(piece, None)
        model.state = "collecting" if model.needed else "incomplete durable"
        if self.latest.get(rollout.id.key) != rollout.id.attempt:
            del self.models[rollout.id]

    @precondition(lambda self: self.handed_out)
    @rule(holds_up_reading=st.booleans())
    def fail_to_write(self, holds_up_reading: bool) -> None:
        """A rollout that was handed out is put back, unless a higher attempt has come."""
        rollout = self.handed_out.popleft()
        needed = self.assembler.awaits(rollout)
        current = self.latest.get(rollout.id.key) == rollout.id.attempt
        put_back = self.assembler.put_back(rollout, holds_up_reading=holds_up_reading)
        assert put_back == (needed and current)
        if put_back:
            STEPS["put back"] += 1
            model = self.models[rollout.id]
            model.state = model.state.replace("handed out", "waits")
        elif needed:
            del self.models[rollout.id]

    @rule()
    def try_again(self) -> None:
        for identity, model in self.models.items():
            again = self.assembler.hand_out_again(identity)
            assert (again is not None) == model.state.endswith("waits")
            if again is not None:
                self.check_slots(again, model)
                model.state = model.state.replace("waits", "handed out")
                self.handed_out.append(again)

    def snapshot_saw(self, rollout: Rollout, model: Model, piece: Piece) -> bool:
        """Returns whether a part of a slot that was not whole came before the snapshot; it is given up then."""
        first = {span.partition: span.last for span in rollout.spans}
        return model.needed[piece] <= first[rollout.id.rollout_id % 2]

    def forget_cuts(self, model: Model, cuts: list[SlotCut], slots: list[WholeSlot]) -> None:
        """Removes what was refused, but no cut with a part that has come since."""
        seen = {piece_of(part) for slot in slots for each in (slot, *slot.rivals) for part in each.parts}
        refused = {(cut.data_parallel_rank, cut.slot, cut.part_count) for cut in cuts}
        parts = {piece for piece in model.held if isinstance(piece, tuple) and piece[:3] in refused}
        fresh = {piece[:3] for piece in parts - seen if isinstance(piece, tuple)}
        model.remove({piece for piece in parts if isinstance(piece, tuple) and piece[:3] not in fresh})

    def close(self, identity: RolloutId) -> None:
        self.models.pop(identity, None)
        self.completed.discard(identity)
        if self.latest.get(identity.key) == identity.attempt:
            del self.latest[identity.key]

    @rule()
    def commit(self) -> None:
        for partition in (0, 1):
            self.committed[partition] = max(
                self.committed[partition], self.assembler.low_watermark(partition, self.cursor[partition])
            )

    @rule()
    def restart(self) -> None:
        STEPS["restarts"] += 1
        self.start()

    @rule(partition=st.integers(0, 1))
    def rebalance(self, partition: int) -> None:
        STEPS["rebalances"] += 1
        self.assembler.forget(partition)
        for identity in [identity for identity in self.models if identity.rollout_id % 2 == partition]:
            self.close(identity)
        self.cursor[partition] = self.committed[partition]

    # What must be true at any time.

    @invariant()
    def memory_is_the_sum_of_what_is_held(self) -> None:
        STEPS["steps"] += 1
        held = [event for model in self.models.values() for event in model.held.values()]
        assert self.assembler.resident_bytes == sum(resident_size(event, SIZE) for event in held)
        assert self.assembler.resident_bytes <= self.cap

    @invariant()
    def the_watermark_passes_nothing_that_is_needed(self) -> None:
        for partition in (0, 1):
            mark = self.assembler.low_watermark(partition, self.cursor[partition])
            needed = [
                offset
                for identity, model in self.models.items()
                if identity.rollout_id % 2 == partition
                for offset in model.needed.values()
            ]
            assert mark <= min(needed, default=self.cursor[partition])
            if not self.models:
                assert mark == self.cursor[partition]

    @invariant()
    def what_is_open_is_known(self) -> None:
        assert self.assembler.open_count == sum(model.state != "incomplete durable" for model in self.models.values())

    def teardown(self) -> None:
        """No rollout is lost: whoever sends all of it again, after whatever happened, gets the whole dump."""
        highest: dict[RolloutKey, int] = {}
        for event in [event for log in self.topic.values() for event in log]:
            key = id_of(event).key
            highest[key] = max(event.attempt, highest.get(key, 0))
        for key, attempt in highest.items():
            identity = RolloutId(key.run_id, attempt, key.rollout_id)
            if identity in self.spoilt:
                continue
            for _ in range(4):
                for event in sent_by(key.run_id, key.rollout_id, attempt, 1):
                    self.topic[partition_of(event)].append(event)
                self.read(key.rollout_id % 2, 10**6)
                self.try_again()
                while self.handed_out:
                    self.publish()
                if self.store.get(key) == attempt:
                    break
            assert self.store.get(key) == attempt, f"{identity} is lost"


def same(one: DpShard, other: DpShard) -> bool:
    return replace(one, published_at_ms=0, part_counts=()) == replace(other, published_at_ms=0, part_counts=())


@pytest.mark.timeout(180)
def test_whatever_happens_in_whatever_order_nothing_is_lost_mixed_or_published_twice() -> None:
    STEPS.clear()

    run_state_machine_as_test(
        AssemblerMachine,
        settings=settings(
            max_examples=300,
            stateful_step_count=60,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )

    assert STEPS["steps"] >= 10_000
    kinds = ("records", "complete", "incomplete", "rejected", "restarts", "put back", "settled")
    assert min(STEPS[kind] for kind in kinds) > 20
