"""An assembled rollout to a durable, announced dump."""

import asyncio
import errno
import logging
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace

from rollcast.consumer.assembler import Assembler
from rollcast.consumer.brief import brief
from rollcast.consumer.config import ConsumeConfig
from rollcast.consumer.dead_letters import DeadLetters
from rollcast.consumer.decisions import Complete
from rollcast.consumer.gaps import Gaps
from rollcast.consumer.intake import Intake
from rollcast.consumer.outputs import Outputs
from rollcast.consumer.preparing import prepare
from rollcast.consumer.restore import Restored
from rollcast.consumer.retry import Retry
from rollcast.consumer.rivals import parts_of
from rollcast.consumer.rollout import Rollout, SlotCut
from rollcast.consumer.scratch import Scratch
from rollcast.consumer.stats import Stats
from rollcast.consumer.store import Dump, DumpStore, Manifest, PublishedDump
from rollcast.consumer.waiting import Waiting
from rollcast.schemas.sizes import counted, size_in_words

_log = logging.getLogger("rollcast.consumer")


class Publishing:
    """Publishes one rollout at a time: restore, verify, measure, keep, announce, and let the watermark move.

    Args:
        config: of the daemon.
        assembler: is told what is durable.
        intake: is told when room may be free.
        letters: get what turns out to be unusable.
        scratch: gives its spare room up where the disk has none for a dump.
        store: keeps the dumps.
        outputs: announces them.
        gaps: what may be why something is missing.
        waiting: gets the rollouts whose dump cannot be written now.
        retry: announces again what Kafka does not take.
        stats: are counted.
        pool: does the work, off the event loop.
    """

    def __init__(
        self,
        config: ConsumeConfig,
        *,
        assembler: Assembler,
        intake: Intake,
        letters: DeadLetters,
        scratch: Scratch,
        store: DumpStore,
        outputs: Outputs,
        gaps: Gaps,
        waiting: Waiting,
        retry: Retry,
        stats: Stats,
        pool: Executor,
    ) -> None:
        self._config = config
        self._assembler, self._intake, self._letters = assembler, intake, letters
        self._scratch, self._store, self._outputs = scratch, store, outputs
        self._gaps, self._waiting, self._retry, self._stats, self._pool = gaps, waiting, retry, stats, pool

    async def publish(self, rollout: Rollout) -> None:
        """Returns when the rollout is durable and announced, can never be, or waits for another try.

        Raises:
            StoppingError: the daemon stops before that; nothing was committed.
        """
        pending = [rollout]
        try:
            while pending:
                rollout = pending.pop()
                # The partition may have been given to another member, which then does all of this.
                if self._assembler.awaits(rollout):
                    pending += await self._publish(rollout)
        finally:
            self._intake.room_may_be_free()

    async def _publish(self, rollout: Rollout) -> list[Rollout]:
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        prepared = await loop.run_in_executor(self._pool, prepare, rollout, self._config)
        rollout, restored, dump = prepared.rollout, prepared.restored, prepared.dump
        if restored.problem is not None:
            await self._set_bad_aside(restored)
            await self._give_up(rollout, restored.problem)
            return []
        if dump is None:
            await self._set_bad_aside(restored)
            if not self._assembler.awaits(rollout):
                return []
            decisions = self._assembler.reject(rollout.id, prepared.refused)
            return [decision.rollout for decision in decisions if isinstance(decision, Complete)]
        if dump.missing:
            dump = replace(dump, gaps=self._gaps.beside(rollout.spans))
        try:
            published = await loop.run_in_executor(self._pool, self._store.publish, dump)
        except OSError as exc:
            if exc.errno in {errno.ENOSPC, errno.EDQUOT}:
                await loop.run_in_executor(self._pool, self._scratch.give_up_spares)
            # Other rollouts go on meanwhile: it may be this one alone that can never be written.
            self._stats.retries += 1
            self._waiting.put_back(rollout, exc, loop.time())
            return []
        self._stats.dump_seconds += loop.time() - started_at
        await self._retry.until_done(f"announce {rollout.id}", lambda: self._outputs.announce(published))
        # Not before, since all of this is done again if the dump cannot be written now.
        await self._set_bad_aside(restored)
        await self._letters.set_aside(prepared.wrong, "another part with its identity has the announced digest")
        self._finish(rollout, complete=not dump.missing, refused=prepared.refused)
        self._report(rollout, dump, published)
        return []

    async def _set_bad_aside(self, restored: Restored) -> None:
        for bad in restored.bad_slots:
            await self._letters.set_aside(parts_of(bad.slot), bad.problem)

    def _finish(self, rollout: Rollout, *, complete: bool, refused: Sequence[SlotCut] = ()) -> None:
        self._waiting.written(rollout.id)
        # An incomplete dump says nothing of the records of an open rollout that was begun anew meanwhile.
        if complete or self._assembler.awaits(rollout):
            self._assembler.finish(rollout.id, complete=complete, refused=refused)

    async def _give_up(self, rollout: Rollout, problem: str) -> None:
        _log.error("%s cannot become a dump: %s", rollout.id, brief(problem))
        closing = [
            (shard.event, shard.event_place)
            for shard in rollout.shards
            if shard.event is not None and shard.event_place is not None
        ]
        await self._letters.set_aside(closing, problem, kind="unusable")
        self._finish(rollout, complete=not rollout.missing)

    def _report(self, rollout: Rollout, dump: Dump, published: PublishedDump) -> None:
        for metric in published.manifest.metrics:
            if metric.failure is not None:
                self._stats.failed_metrics[metric.name] += 1
                _log.warning("%s: metric %s cannot be computed: %s", rollout.id, metric.name, metric.failure)
        self._stats.note_progress()
        if dump.missing:
            self._stats.incomplete_dumps += 1
            _log.warning("%s is incomplete (%s) -> %s", rollout.id, dump.missing, published.path)
            return
        self._stats.dumps += 1
        _log.info("%s: %s -> %s", rollout.id, _summary(published.manifest), published.path)


def _summary(manifest: Manifest) -> str:
    means = {metric.name: metric.per_rollout_mean for metric in manifest.metrics}
    named = {"|d|": "train_rollout_logprob_abs_diff", "k3": "k3_kl", "reward": "reward"}
    shown = [
        f", {label} {'-' if means[name] is None else format(means[name], '.4g')}"
        for label, name in named.items()
        if name in means
    ]
    return (
        f"{counted(manifest.samples, 'sample')} in {counted(manifest.parts, 'part')}, "
        f"{size_in_words(manifest.raw_bytes)} raw, "
        f"{size_in_words(manifest.wire_bytes)} on the wire{''.join(shown)}"
    )
