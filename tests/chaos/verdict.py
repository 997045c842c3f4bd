"""Whether the daemons made of the story what they had to."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from chaos.story import Outcome, Story
from fixtures.frames import ShardSource, direct_shards
from rollcast.consumer.difference import differences
from rollcast.consumer.dump_file import load_dump
from rollcast.schemas import DeadLetter, DumpCompleted, Topics, build_dump_payload, decode

_LOCK_NAME: Final = ".rollcast.lock"
_WRITER_RANK: Final = 3
_SHOWN_DIFFERENCES: Final = 3


class Verdict:
    """Compares files and topics with the outcomes of the story.

    Args:
        story: what was sent.
        folder: of the dumps, one folder in it for each run.
        bootstrap_servers: the broker.
        topics: of the daemons.
        group_id: of the daemons.
    """

    def __init__(self, story: Story, *, folder: Path, bootstrap_servers: str, topics: Topics, group_id: str) -> None:
        self._story, self._folder = story, folder
        self._bootstrap_servers, self._topics, self._group_id = bootstrap_servers, topics, group_id

    async def unfinished(self) -> list[str]:
        """Returns what is still to come; nothing when the daemons have done all they had to do."""
        return (
            [problem for outcome in self._story.outcomes for problem in self._manifest_problems(outcome)]
            or await self._offset_problems()
            or await self._dead_letter_problems()
            or await self._announcement_problems()
        )

    async def problems(self) -> list[str]:
        """Returns all that is not as it must be; to be asked when the daemons have stopped."""
        found = await self.unfinished()
        found += [problem for outcome in self._story.outcomes for problem in self._content_problems(outcome)]
        return found + [f"{path} was left" for path in self._left_over()]

    def _path(self, outcome: Outcome) -> Path:
        word = ".incomplete" if outcome.missing is not None else ""
        return self._folder / outcome.run_id / f"{outcome.rollout_id}{word}.pt"

    def _earlier_path(self, outcome: Outcome) -> Path:
        return self._folder / outcome.run_id / f"{outcome.rollout_id}.attempt-1.pt"

    def _manifest_problems(self, outcome: Outcome) -> list[str]:
        if outcome.dropped:
            return []
        path = self._path(outcome)
        try:
            manifest = json.loads(_manifest_path(path).read_text())
        except FileNotFoundError:
            return [f"{outcome}: {path.name} or its manifest is not there"]
        found = (manifest["attempt"], manifest.get("missing"))
        wanted = (outcome.attempt, outcome.missing)
        return [f"{outcome}: attempt and missing are {found}, not {wanted}"] if found != wanted else []

    def _content_problems(self, outcome: Outcome) -> list[str]:
        pairs = [(self._path(outcome), outcome.sources)]
        if outcome.earlier is not None:
            pairs.append((self._earlier_path(outcome), outcome.earlier))
        return [
            f"{path}: {problem}"
            for path, sources in pairs
            if path.exists()
            for problem in differences(*_comparable(load_dump(path), outcome, sources), limit=_SHOWN_DIFFERENCES)
        ]

    def _left_over(self) -> list[Path]:
        """Returns the files that have no place among the dumps at the end."""
        dumps = [self._path(outcome) for outcome in self._story.outcomes if not outcome.dropped]
        dumps += [self._earlier_path(outcome) for outcome in self._story.outcomes if outcome.earlier is not None]
        placed = {*dumps, *map(_manifest_path, dumps)}
        return [
            path
            for path in sorted(self._folder.rglob("*"))
            if path.is_file() and path.name != _LOCK_NAME and path not in placed
        ]

    async def _offset_problems(self) -> list[str]:
        admin: Any = AIOKafkaAdminClient(bootstrap_servers=self._bootstrap_servers)
        await admin.start()
        try:
            committed = await admin.list_consumer_group_offsets(self._group_id)
        finally:
            await admin.close()
        offsets = {at.partition: offset.offset for at, offset in committed.items()}
        _, ends = await self._read(self._topics.records)
        return [
            f"partition {partition}: {offsets.get(partition)} is committed, its end is {end}"
            for partition, end in ends.items()
            if end and offsets.get(partition) != end
        ]

    async def _dead_letter_problems(self) -> list[str]:
        records, _ = await self._read(self._topics.records)
        letters = [decode(record.value) for record in (await self._read(self._topics.dead_letters))[0]]
        wanted = {
            (record.partition, record.offset): record.value for record in records if record.value in self._story.garbage
        }
        found = {
            (letter.partition, letter.offset): letter.value for letter in letters if isinstance(letter, DeadLetter)
        }
        problems = [f"no dead letter of partition, offset {place}" for place in sorted(wanted.keys() - found.keys())]
        problems += [f"a dead letter of {place}, which is no garbage" for place in sorted(found.keys() - wanted.keys())]
        problems += [
            f"the dead letter of {place} has another value"
            for place in sorted(found.keys() & wanted.keys())
            if found[place] != wanted[place]
        ]
        lost = self._story.garbage - set(wanted.values())
        return problems + ([f"{len(lost)} values of garbage were never on the topic"] if lost else [])

    async def _announcement_problems(self) -> list[str]:
        events = [decode(record.value) for record in (await self._read(self._topics.dumps))[0]]
        told = {
            (event.run_id, event.rollout_id, event.attempt, event.complete)
            for event in events
            if isinstance(event, DumpCompleted)
        }
        return [
            f"{outcome}: the dump was not announced"
            for outcome in self._story.outcomes
            if not outcome.dropped
            and (outcome.run_id, outcome.rollout_id, outcome.attempt, outcome.missing is None) not in told
        ]

    async def _read(self, topic: str) -> tuple[list[Any], dict[int, int]]:
        """Returns the records of a topic, and the end of each partition."""
        consumer: Any = AIOKafkaConsumer(
            topic, bootstrap_servers=self._bootstrap_servers, auto_offset_reset="earliest", enable_auto_commit=False
        )
        await consumer.start()
        try:
            ends: dict[TopicPartition, int] = await consumer.end_offsets(consumer.assignment())
            records: list[Any] = []
            while any([await consumer.position(partition) < end for partition, end in ends.items()]):
                for batch in (await consumer.getmany(timeout_ms=1000)).values():
                    records += batch
        finally:
            await consumer.stop()
        return records, {at.partition: end for at, end in ends.items()}


def _manifest_path(dump: Path) -> Path:
    return dump.with_name(f"{dump.name}.manifest.json")


def _comparable(dump: dict[str, Any], outcome: Outcome, sources: Sequence[ShardSource]) -> tuple[object, object]:
    """Returns what must be equal: all of the dump and the direct payload, or their samples if some are missing."""
    direct = build_dump_payload(direct_shards(sources), rollout_id=outcome.rollout_id, writer_rank=_WRITER_RANK)
    if outcome.missing is None:
        return dump, direct
    return dump["samples"], [sample for sample in direct["samples"] if _arrived(sample, outcome, sources)]


def _arrived(sample: dict[str, Any], outcome: Outcome, sources: Sequence[ShardSource]) -> bool:
    rank = sample["data_parallel_rank"]
    slot = sources[rank].rollout_data["partition"].index(sample["rollout_position"])
    return (rank, slot) not in outcome.withheld_slots
