"""Fetched records to events, and what the assembler's decisions mean for them."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeAlias

from rollcast.consumer.assembler import Assembler
from rollcast.consumer.brief import brief
from rollcast.consumer.config import ConsumeConfig
from rollcast.consumer.dead_letters import DeadLetters
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
from rollcast.consumer.decoding import Decoded, Problem, decode_all
from rollcast.consumer.errors import AssemblerFullError, InvalidRecordError, ScratchFullError
from rollcast.consumer.outputs import Outputs
from rollcast.consumer.reading_clock import ReadingClock
from rollcast.consumer.retry import Retry, StoppingError
from rollcast.consumer.rivals import place_beside
from rollcast.consumer.rollout import Place, Rollout, RolloutKey
from rollcast.consumer.scratch import Scratch
from rollcast.consumer.stats import Stats
from rollcast.consumer.store import DumpStore, PublishedDump
from rollcast.consumer.trainers import Trainers
from rollcast.consumer.waiting import is_lasting
from rollcast.schemas import ContractError, DeadLetter, DpShard, SamplePart

_CHUNK_BYTES = 4 * 1024 * 1024
_ROOM_PAUSE_S = 0.5

_log = logging.getLogger("rollcast.consumer")


_Rivals: TypeAlias = Sequence[SamplePart] | None
"""What a part is to be compared with; nothing for one that is simply wanted; None for what needs no place."""


class Intake:
    """Takes batches of records of one partition each.

    Args:
        config: of the daemon.
        assembler: gets the events.
        scratch: gets the tensors of parts that the assembler wants.
        clock: for the assembler.
        store: is asked about rollouts that the assembler does not know.
        outputs: announces what a process that died may not have announced.
        letters: get the records that cannot be used.
        retry: for all of them.
        stats: are counted.
        pool: one thread that decodes, off the event loop.
    """

    def __init__(
        self,
        config: ConsumeConfig,
        *,
        assembler: Assembler,
        scratch: Scratch,
        clock: ReadingClock,
        store: DumpStore,
        outputs: Outputs,
        letters: DeadLetters,
        retry: Retry,
        stats: Stats,
        pool: Executor,
    ) -> None:
        self._config = config
        self._assembler, self._scratch, self._store, self._outputs = assembler, scratch, store, outputs
        self._clock, self._letters, self._retry, self._stats, self._pool = clock, letters, retry, stats, pool
        self._trainers = Trainers()
        self._room = asyncio.Event()

    async def take(
        self,
        partition: int,
        records: Sequence[Any],
        still_ours: Callable[[], bool],
        hand_out: Callable[[Rollout], Awaitable[None]],
    ) -> None:
        """Hands out the rollouts that these records completed; returns when every unusable record is a dead letter.

        Takes no more as soon as `still_ours` says that another group member has the partition now. Where room is
        short it waits for rollouts that are being published, and has unfinished ones published before their time.

        Raises:
            AssemblerFullError: one record alone does not fit into memory.
            StoppingError: the daemon stops before that; the records must come again.
        """
        loop = asyncio.get_running_loop()
        for some in _chunks(records):
            values = [record.value or b"" for record in some]
            events = await loop.run_in_executor(self._pool, decode_all, values, self._config.limits)
            await self._recognise_published(events)
            waiting = deque(zip(some, events, strict=True))
            while waiting and still_ours():
                placed = await self._placed([event for _, event in waiting])
                if placed:
                    taken = deque((waiting.popleft()[0], event) for event in placed)
                    # What refers to tensors that the assembler has let go keeps their space taken.
                    placed.clear()
                    await self._take(partition, taken, still_ours, hand_out)
                else:
                    await self._make_scratch_room(hand_out)
            if not still_ours():
                return

    async def _take(
        self,
        partition: int,
        taken: deque[tuple[Any, Decoded]],
        still_ours: Callable[[], bool],
        hand_out: Callable[[Rollout], Awaitable[None]],
    ) -> None:
        letters: list[DeadLetter] = []
        while taken:
            record, event = taken.popleft()
            if not still_ours():
                return
            value = record.value or b""
            self._stats.records += 1
            self._stats.record_bytes += len(value)
            place = Place(partition, record.offset)
            if isinstance(event, Problem):
                letters.append(self._letters.letter(place, record.key, value, event.kind, event.text, event.run_id))
                continue
            run_id = event.run_id
            try:
                decisions = await self._add(event, place, len(value), still_ours, hand_out)
            except InvalidRecordError as exc:
                letters.append(self._letters.letter(place, record.key, value, "invalid", str(exc), run_id))
                continue
            if isinstance(event, DpShard):
                self._trainers.saw(event)
            for decision in decisions:
                if isinstance(decision, Complete):
                    await hand_out(decision.rollout)
                elif isinstance(decision, Conflict):
                    letters.append(self._letters.letter(place, record.key, value, "conflict", decision.problem, run_id))
                    if decision.held is not None:
                        await self._letters.set_aside([decision.held], decision.problem, "conflict")
                elif isinstance(decision, Discarded):
                    parts = zip(decision.parts, decision.places, strict=True)
                    await self._letters.set_aside(parts, decision.problem)
                else:
                    self._note(decision)
        await self._letters.deliver(letters)

    async def _add(
        self,
        event: SamplePart | DpShard,
        place: Place,
        size: int,
        still_ours: Callable[[], bool],
        hand_out: Callable[[Rollout], Awaitable[None]],
    ) -> list[Decision]:
        while still_ours():
            try:
                return self._assembler.add(event, place, size=size, now=self._clock.now)
            except AssemblerFullError as exc:
                if not await self._wait_for_room(str(exc), hand_out):
                    raise
        return []

    async def _placed(self, events: Sequence[Decoded]) -> list[Decoded]:
        """Returns the first events with the tensors of wanted parts in the scratch; none if there is no room now."""
        loop = asyncio.get_running_loop()
        rivals = [self._rivals(event) for event in events]
        place = partial(_place_all, self._scratch, list(zip(events, rivals, strict=True)))
        return await self._retry.until_done("keep tensors", lambda: loop.run_in_executor(self._pool, place))

    def _rivals(self, event: Decoded) -> _Rivals:
        if not isinstance(event, SamplePart):
            return None
        return () if self._assembler.wants(event) else self._assembler.rivals_of(event) or None

    async def _make_scratch_room(self, hand_out: Callable[[Rollout], Awaitable[None]]) -> None:
        if (evicted := self._assembler.evict_oldest()) is not None:
            self._note(evicted)
            return
        problem = f"unfinished rollouts take all of max_scratch_bytes={self._config.max_scratch_bytes}"
        if not await self._wait_for_room(problem, hand_out):
            # Work of partitions that are another member's by now goes on for a while.
            await self._retry.pause(_ROOM_PAUSE_S)
            if self._retry.stopping:
                raise StoppingError("take records")

    async def _wait_for_room(self, problem: str, hand_out: Callable[[Rollout], Awaitable[None]]) -> bool:
        """Returns after a try to write a rollout, having one handed out if need be; False if there is none.

        Raises:
            StoppingError: the daemon stops.
        """
        self._room.clear()
        if not self._assembler.awaits_finish:
            given_up = self._assembler.give_up_oldest()
            if given_up is not None:
                self._stats.given_up += 1
                _log.warning(
                    "%s is written as incomplete before its time, to make room: %s", given_up.rollout.id, problem
                )
                await hand_out(given_up.rollout)
                del given_up
            elif not self._assembler.awaits_another_try:
                return False
        await self._retry.wait_for(self._room)
        if not self._room.is_set():
            raise StoppingError("take records")
        return True

    def forget_places(self) -> None:
        """Has nothing that comes from now on share a place with what came before."""
        self._scratch.forget()

    def room_may_be_free(self) -> None:
        """Says that a rollout that was handed out is finished, or will not be."""
        self._room.set()

    async def _recognise_published(self, events: Sequence[Decoded]) -> None:
        """Asks the store about new rollouts, so that what was published before a restart is not assembled again."""
        unknown = {
            key: event.attempt
            for event in events
            if not isinstance(event, Problem)
            and not self._assembler.knows(key := RolloutKey(event.run_id, event.rollout_id, event.stream))
        }
        for key, attempt in unknown.items():
            published = await self._published(key)
            if published is None:
                continue
            self._assembler.remember(key, published.manifest.id.attempt)
            self._stats.already_published += 1
            if published.manifest.id.attempt == attempt:
                # The process that wrote it may have died before it could say so; a repeat is harmless.
                await self._retry.until_done("announce a dump", partial(self._outputs.announce, published))

    async def _published(self, key: RolloutKey) -> PublishedDump | None:
        def look() -> PublishedDump | None:
            try:
                return self._store.published(key)
            except OSError as exc:
                if is_lasting(exc):
                    # It costs this rollout alone: who wants to write its dump is told the same, and waits.
                    return None
                raise

        loop = asyncio.get_running_loop()
        return await self._retry.until_done("read a manifest", lambda: loop.run_in_executor(self._pool, look))

    def _note(self, decision: Decision) -> None:
        if isinstance(decision, Duplicate):
            self._stats.duplicates += 1
            self._stats.count(decision.rollout_id.run_id, "duplicate")
        elif isinstance(decision, Late):
            self._stats.count(decision.rollout_id.run_id, "late")
        elif isinstance(decision, Stale):
            self._stats.stale += 1
            self._stats.count(decision.rollout_id.run_id, "stale")
            self._trainers.left(decision, self._clock.now)
        elif isinstance(decision, Superseded):
            self._stats.superseded += 1
            _log.warning("%s is given up: attempt %d sends it again", decision.rollout_id, decision.by_attempt)
        elif isinstance(decision, Evicted):
            self._stats.evicted += 1
            _log.warning("%s stays incomplete: its records had to make room", decision.rollout_id)
        elif isinstance(decision, Dropped):
            self._stats.dropped += 1
            _log.warning("%s was dropped by its producer: %s", decision.rollout_id, brief(decision.reason))


def _chunks(records: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yields the records in groups of bounded size, so that few bytes are held decoded and not yet placed."""
    first = size = 0
    for index, record in enumerate(records):
        if size and size + len(record.value or b"") > _CHUNK_BYTES:
            yield records[first:index]
            first, size = index, 0
        size += len(record.value or b"")
    yield records[first:]


def _place_all(scratch: Scratch, events: Sequence[tuple[Decoded, _Rivals]]) -> list[Decoded]:
    placed: list[Decoded] = []
    for event, rivals in events:
        if rivals is None or not isinstance(event, SamplePart):
            placed.append(event)
            continue
        try:
            placed.append(place_beside(scratch, event, rivals))
        except ContractError as exc:
            placed.append(Problem("content", str(exc), event.run_id))
        except ScratchFullError:
            break
        except OSError:
            if not placed:
                raise
            break
    return placed
