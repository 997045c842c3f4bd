"""The assembler against a simple model: random records, attempts, publishing, restarts and rebalances."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test

from fixtures.assembler_checks import AssemblerChecks
from fixtures.assembler_model import BAD, EXPIRE_S, Event, id_of, is_bad, partition_of, piece_of, sent_by
from rollcast.consumer.decisions import Evicted
from rollcast.consumer.errors import AssemblerFullError, InvalidRecordError
from rollcast.consumer.open_rollout import resident_size
from rollcast.consumer.rollout import Place, RolloutId, RolloutKey
from rollcast.schemas import DpShard, SamplePart

SIZE = 100
RUNS, ROLLOUTS, ATTEMPTS = ("a", "b"), (0, 1, 2), (1, 2, 3)
STEPS: Counter[str] = Counter()


class AssemblerMachine(AssemblerChecks):
    """What producers and the daemon do, in any order."""

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
