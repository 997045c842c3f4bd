"""Fetched records to events, and what the assembler's decisions mean for them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

from rollcast.consumer.assembler import Assembler
from rollcast.consumer.brief import brief
from rollcast.consumer.config import ConsumeConfig
from rollcast.consumer.decisions import (
    Complete,
    Conflict,
    Decision,
    Discarded,
    Dropped,
    Duplicate,
    Evicted,
    Stale,
    Superseded,
)
from rollcast.consumer.errors import AssemblerFullError, ConsumeError, InvalidRecordError
from rollcast.consumer.outputs import Outputs, dead_letter
from rollcast.consumer.retry import Retry, StoppingError
from rollcast.consumer.rollout import Place, Rollout, RolloutKey
from rollcast.consumer.stats import Stats
from rollcast.consumer.store import DumpStore, PublishedDump
from rollcast.consumer.validity import check_event
from rollcast.schemas import ContractError, DeadLetter, DpShard, Limits, SamplePart, decode, encode

_REMEMBERED_ALARMS = 1024

_log = logging.getLogger("rollcast.consumer")


class _Problem(str):
    """Why a record is no usable event."""


class Intake:
    """Takes batches of records of one partition each.

    Args:
        config: of the daemon.
        assembler: gets the events.
        store: is asked about rollouts that the assembler does not know.
        outputs: gets the dead letters.
        retry: for both.
        stats: are counted.
        pool: decodes, off the event loop.
    """

    def __init__(
        self,
        config: ConsumeConfig,
        *,
        assembler: Assembler,
        store: DumpStore,
        outputs: Outputs,
        retry: Retry,
        stats: Stats,
        pool: Executor,
    ) -> None:
        self._config = config
        self._assembler, self._store, self._outputs = assembler, store, outputs
        self._retry, self._stats, self._pool = retry, stats, pool
        self._alarmed: set[tuple[str, int]] = set()
        self._room = asyncio.Event()

    async def take(
        self,
        partition: int,
        records: Sequence[Any],
        still_ours: Callable[[], bool],
        hand_out: Callable[[Rollout], Awaitable[None]],
    ) -> None:
        """Hands out the rollouts that these records completed; returns when every unusable record is a dead letter.

        Takes no more as soon as `still_ours` says that another group member has the partition now. Where memory is
        short it waits for rollouts that are being published, and has unfinished ones published before their time.

        Raises:
            AssemblerFullError: one record alone does not fit into memory.
            StoppingError: the daemon stops before that; the records must come again.
        """
        loop = asyncio.get_running_loop()
        values = [record.value or b"" for record in records]
        events = await loop.run_in_executor(self._pool, _decode_all, values, self._config.limits)
        await self._recognise_published(events)
        letters: list[DeadLetter] = []
        for record, value, event in zip(records, values, events, strict=True):
            if not still_ours():
                return
            self._stats.records += 1
            self._stats.record_bytes += len(value)
            place = Place(partition, record.offset)
            if isinstance(event, _Problem):
                letters.append(self._letter(place, record.key, value, "decode", event))
                continue
            try:
                decisions = await self._add(event, place, len(value), still_ours, hand_out)
            except InvalidRecordError as exc:
                letters.append(self._letter(place, record.key, value, "invalid", str(exc)))
                continue
            for decision in decisions:
                if isinstance(decision, Complete):
                    await hand_out(decision.rollout)
                elif isinstance(decision, Conflict):
                    letters.append(self._letter(place, record.key, value, "conflict", decision.problem))
                elif isinstance(decision, Discarded):
                    letters += self.letters_of_parts(decision.parts, decision.places, decision.problem)
                else:
                    self._note(decision)
        await self.deliver(letters)

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
                return self._assembler.add(event, place, size=size, now=asyncio.get_running_loop().time())
            except AssemblerFullError as exc:
                self._room.clear()
                if not self._assembler.awaits_finish:
                    given_up = self._assembler.give_up_oldest()
                    if given_up is None:
                        raise
                    self._stats.given_up += 1
                    _log.warning(
                        "%s is written as incomplete before its time, to make room: %s", given_up.rollout.id, exc
                    )
                    await hand_out(given_up.rollout)
            await self._retry.wait_for(self._room)
            if not self._room.is_set():
                raise StoppingError("take records")
        return []

    def room_may_be_free(self) -> None:
        """Says that a rollout that was handed out is finished, or will not be."""
        self._room.set()

    async def deliver(self, letters: Sequence[DeadLetter]) -> None:
        """Returns when the dead letters are delivered; one that Kafka refuses for good is counted and given up."""
        if not letters:
            return
        try:
            await self._retry.until_done("send dead letters", lambda: self._outputs.send_dead_letters(letters))
        except ConsumeError as exc:
            if len(letters) > 1:
                for letter in letters:
                    await self.deliver([letter])
                return
            (letter,) = letters
            self._stats.lost_dead_letters += 1
            _log.error(
                "the dead letter of %s[%d]@%d is lost: %s", letter.topic, letter.partition, letter.offset, brief(exc)
            )

    def letters_of_parts(
        self, parts: Sequence[SamplePart | DpShard], places: Sequence[Place], problem: str, kind: str = "content"
    ) -> list[DeadLetter]:
        """Returns the dead letters of records whose event turned out to be unusable."""
        return [
            self._letter(place, None, encode(part), kind, problem) for part, place in zip(parts, places, strict=True)
        ]

    def _letter(self, place: Place, key: bytes | None, value: bytes, kind: str, problem: str) -> DeadLetter:
        topic = self._config.topics.records
        self._stats.dead_letters[kind] += 1
        _log.warning("%s[%d]@%d goes to dead letters: %s", topic, place.partition, place.offset, brief(problem))
        reason = f"{kind}: {problem}"
        return dead_letter(topic, place.partition, place.offset, key=key, value=value, reason=reason)

    async def _recognise_published(self, events: Sequence[SamplePart | DpShard | _Problem]) -> None:
        """Asks the store about new rollouts, so that what was published before a restart is not assembled again."""
        unknown = {
            key: event.attempt
            for event in events
            if not isinstance(event, _Problem)
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
        loop = asyncio.get_running_loop()
        return await self._retry.until_done(
            "read a manifest",
            lambda: loop.run_in_executor(self._pool, self._store.published, key),
        )

    def _note(self, decision: Decision) -> None:
        if isinstance(decision, Duplicate):
            self._stats.duplicates += 1
        elif isinstance(decision, Stale):
            self._stats.stale += 1
            alarm = (decision.rollout_id.run_id, decision.rollout_id.attempt)
            if alarm not in self._alarmed:
                if len(self._alarmed) >= _REMEMBERED_ALARMS:
                    self._alarmed.clear()
                self._alarmed.add(alarm)
                _log.warning(
                    "%s still sends, but attempt %d has begun: two trainers share one run id, or a clock went back",
                    decision.rollout_id,
                    decision.current_attempt,
                )
        elif isinstance(decision, Superseded):
            self._stats.superseded += 1
            _log.warning("%s is given up: attempt %d sends it again", decision.rollout_id, decision.by_attempt)
        elif isinstance(decision, Evicted):
            self._stats.evicted += 1
            _log.warning("%s stays incomplete: its records had to make room", decision.rollout_id)
        elif isinstance(decision, Dropped):
            self._stats.dropped += 1
            _log.warning("%s was dropped by its producer: %s", decision.rollout_id, brief(decision.reason))


def _decode_all(values: Sequence[bytes], limits: Limits) -> list[SamplePart | DpShard | _Problem]:
    return [_decode(value, limits) for value in values]


def _decode(value: bytes, limits: Limits) -> SamplePart | DpShard | _Problem:
    try:
        event = decode(value, limits)
        if not isinstance(event, (SamplePart, DpShard)):
            return _Problem(f"a {type(event).__name__} has no place on this topic")
        check_event(event, limits)
    except (ContractError, InvalidRecordError) as exc:
        return _Problem(str(exc))
    return event
