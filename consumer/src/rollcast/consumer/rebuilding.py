"""Makes dumps again from the records that are still on the topic."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiokafka.errors import KafkaError

from rollcast.consumer.assembler import Assembler
from rollcast.consumer.brief import first_few
from rollcast.consumer.config import ConsumeConfig
from rollcast.consumer.decisions import Complete, Decision
from rollcast.consumer.errors import ConsumeError, InvalidRecordError, ShutFileError
from rollcast.consumer.folder_trouble import folder_trouble
from rollcast.consumer.preparing import prepare
from rollcast.consumer.replay import Replay
from rollcast.consumer.rivals import place_beside
from rollcast.consumer.rollout import Place, RolloutKey
from rollcast.consumer.scratch import Scratch
from rollcast.consumer.store import Dump, LocalDumpStore, Manifest
from rollcast.consumer.store.describing import digests_of
from rollcast.consumer.topics import prepare_topics
from rollcast.consumer.validity import check_event
from rollcast.consumer.verification import verify
from rollcast.schemas import TRAIN_STREAM, ContractError, DpShard, SamplePart, decode, record_key

_log = logging.getLogger("rollcast.consumer")


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What became of one rollout.

    Attributes:
        rollout_id: its number.
        told: what was done, or what is missing.
        done: whether a sound dump is there now.
        path: of its file, or of its manifest if it has several; None where nothing was written.
    """

    rollout_id: int
    told: str
    done: bool
    path: Path | None = None


async def rebuild(config: ConsumeConfig, run_id: str, rollout_ids: Iterable[int]) -> AsyncIterator[Rebuilt]:
    """Yields what became of each rollout; a sound dump that is there is left as it is, a damaged one is kept aside.

    Reads where the manifest says that the records are, else the partition of the rollout's key, else all partitions;
    as no member of any group, so that a running daemon notices nothing. With a manifest only its attempt is rebuilt.

    Raises:
        ConsumerError: Kafka or the folder cannot be used.
    """
    store = LocalDumpStore.of(config)
    scratch = Scratch(config.scratch_directory, config.max_scratch_bytes, config.limits)
    wanted: dict[int, Manifest | None] = {}
    try:
        await asyncio.to_thread(store.open)
        for rollout_id in dict.fromkeys(rollout_ids):
            try:
                sound, known = await asyncio.to_thread(_look, store, RolloutKey(run_id, rollout_id))
            except ShutFileError as exc:
                yield Rebuilt(rollout_id, f"{exc}; it may be sound, so it was left as it is", done=False)
                continue
            if sound:
                yield Rebuilt(rollout_id, "its dump is there, as the manifest says", done=True)
            else:
                wanted[rollout_id] = known
        if wanted:
            await asyncio.to_thread(scratch.open)
            await prepare_topics(config)
            async with Replay(config) as replay:
                async for rebuilt in _rebuild_from(replay, config, store, scratch, run_id, wanted):
                    yield rebuilt
    except KafkaError as exc:
        raise ConsumeError(f"Kafka at {config.bootstrap_servers} failed: {exc!r}; try again") from exc
    except OSError as exc:
        raise ConsumeError(
            f"dumps cannot be kept at {config.dump_path!r}, or their tensors at {config.scratch_directory}: "
            f"{folder_trouble(exc, '--dump-path or --scratch-dir')}"
        ) from exc


def _look(store: LocalDumpStore, key: RolloutKey) -> tuple[bool, Manifest | None]:
    """Returns whether a sound dump of the rollout is there, and the manifest that is known of it.

    Raises:
        ShutFileError: one is there that this user may not read.
    """
    published = store.published(key)
    if published is None or published.removed:
        return False, store.known(key)
    bad = [verdict for verdict in verify(published.path) if verdict.problem is not None]
    for verdict in bad:
        if verdict.shut:
            raise ShutFileError(str(verdict))
        _log.warning("%s", verdict)
    return not bad, published.manifest


async def _rebuild_from(
    replay: Replay,
    config: ConsumeConfig,
    store: LocalDumpStore,
    scratch: Scratch,
    run_id: str,
    wanted: dict[int, Manifest | None],
) -> AsyncIterator[Rebuilt]:
    likely = [
        each for rollout_id, known in wanted.items() for each in replay.likely(record_key(run_id, rollout_id), known)
    ]
    missing: dict[int, str] = {}
    for ranges in (likely, replay.everything()):
        assembly = _Assembly(config, scratch, run_id, wanted)
        keys = {record_key(run_id, rollout_id) for rollout_id in wanted}
        rebuilt: dict[int, Rebuilt] = {}
        async for record in replay.records(ranges, keys):
            for dump in await asyncio.to_thread(assembly.take, record):
                rollout_id = dump.rollout.id.rollout_id
                known = wanted[rollout_id]
                rebuilt[rollout_id] = await asyncio.to_thread(_publish, store, dump, known)
                if known is not None:
                    del wanted[rollout_id]
            if not wanted:
                break
        for rollout_id, each in rebuilt.items():
            # Without a manifest a higher attempt could have followed until the end was read.
            wanted.pop(rollout_id, None)
            yield each
        if not wanted:
            return
        missing = assembly.missing()
    begins = ", ".join(f"{each.first} of partition {each.partition}" for each in replay.everything())
    runs = f" (the runs that were seen: {first_few(map(repr, replay.runs()))})" if replay.runs() else ""
    for rollout_id in wanted:
        told = missing.get(rollout_id, f"none of its records is there{runs}")
        yield Rebuilt(rollout_id, f"{told}; {config.topics.records} begins at offset {begins}", done=False)


def _publish(store: LocalDumpStore, dump: Dump, known: Manifest | None) -> Rebuilt:
    rollout = dump.rollout.id
    if known is not None and known.digests != digests_of(dump.rollout):
        return Rebuilt(
            rollout.rollout_id,
            f"the records of attempt {rollout.attempt} have another content than its manifest tells; the dump that "
            "was there cannot be made again",
            done=False,
        )
    if known is not None:
        store.withdraw(rollout)
    published = store.publish(dump)
    told = f"{published.path} is rebuilt"
    if known is not None:
        equal = published.manifest.sha256 == known.sha256
        told += ", byte for byte as before" if equal else ", with the same content as before"
    return Rebuilt(rollout.rollout_id, told, done=True, path=published.path)


class _Assembly:
    """Puts the wanted rollouts together from records in any order; for one thread at a time."""

    def __init__(
        self, config: ConsumeConfig, scratch: Scratch, run_id: str, wanted: dict[int, Manifest | None]
    ) -> None:
        self._config, self._scratch, self._run_id, self._wanted = config, scratch, run_id, wanted
        self._assembler = Assembler(incomplete_after_s=0, max_resident_bytes=config.max_resident_bytes)
        self._problems: dict[int, str] = {}

    def take(self, record: Any) -> list[Dump]:
        """Returns the dumps that this record completes; a record that is not of a wanted rollout changes nothing.

        Raises:
            AssemblerFullError: unfinished rollouts do not fit into memory.
            ScratchFullError: their tensors do not fit into the scratch files.
            OSError: the scratch folder cannot be used.
        """
        value = record.value or b""
        try:
            event = decode(value, self._config.limits)
            if not isinstance(event, (SamplePart, DpShard)) or not self._is_wanted(event):
                return []
            check_event(event, self._config.limits)
            if isinstance(event, SamplePart):
                rivals = self._assembler.rivals_of(event)
                if rivals or self._assembler.wants(event):
                    event = place_beside(self._scratch, event, rivals)
            decisions = self._assembler.add(event, Place(record.partition, record.offset), size=len(value), now=0)
        except (ContractError, InvalidRecordError) as exc:
            _log.warning("%s[%d]@%d is not used: %s", record.topic, record.partition, record.offset, exc)
            return []
        return self._dumps(decisions)

    def missing(self) -> dict[int, str]:
        """Returns what the unfinished rollouts lack."""
        unfinished = {each.rollout.id.rollout_id: str(each.rollout.missing) for each in self._assembler.expire(0)}
        return unfinished | self._problems

    def _is_wanted(self, event: SamplePart | DpShard) -> bool:
        if event.run_id != self._run_id or event.rollout_id not in self._wanted:
            return False
        known = self._wanted[event.rollout_id]
        return event.stream == TRAIN_STREAM and (known is None or event.attempt == known.id.attempt)

    def _dumps(self, decisions: list[Decision]) -> list[Dump]:
        dumps = []
        pending = [decision.rollout for decision in decisions if isinstance(decision, Complete)]
        while pending:
            prepared = prepare(pending.pop(), self._config)
            identity, problem = prepared.rollout.id, prepared.restored.problem
            if prepared.dump is not None:
                self._assembler.finish(identity, complete=True)
                dumps.append(prepared.dump)
            elif problem is not None:
                self._assembler.finish(identity, complete=True)
                self._problems[identity.rollout_id] = problem
            else:
                again = self._assembler.reject(identity, prepared.refused)
                pending += [decision.rollout for decision in again if isinstance(decision, Complete)]
        return dumps
