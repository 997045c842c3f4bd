"""What the ranks find out together at start, and what follows from it for every bundle."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import xxhash

from rollcast.producer.config import PublisherConfig
from rollcast.producer.control import Control
from rollcast.producer.errors import ProducerError
from rollcast.producer.parallel import ParallelLayout
from rollcast.producer.plan import ShardPlan
from rollcast.producer.quota import Quota
from rollcast.producer.spool.folder import BundleName, SpoolFolder
from rollcast.producer.spool.tensor_file import TensorFiles
from rollcast.producer.spool.trainers import living_trainers
from rollcast.producer.spool.write import BundleWriter
from rollcast.schemas.events import TRAIN_STREAM, DpShard

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_log = logging.getLogger("rollcast.producer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """One start of the publisher on one rank that takes part.

    Attributes:
        config: of the publisher.
        layout: this rank's coordinates.
        spool: its spool.
        attempt: number of this start, agreed by all ranks.
        files: opens the tensor files of this process.
        in_place: the context-parallel peers map one file; otherwise they send their pieces to the writer.
        shards_here: number of shards that are written to this spool.
        quota: of the spool.
    """

    config: PublisherConfig
    layout: ParallelLayout
    spool: SpoolFolder
    attempt: int
    files: TensorFiles
    in_place: bool
    shards_here: int
    quota: Quota

    @property
    def shard_source(self) -> str:
        """Source of this shard's bundles."""
        return f"dp{self.layout.data_parallel_rank}"

    @property
    def own_sources(self) -> set[str]:
        """Sources of the bundles that this rank commits."""
        return {f"loss{self.layout.rank}"} | ({self.shard_source} if self.layout.is_writer else set[str]())

    def rollout_key(self, name: BundleName) -> str:
        """Returns what tells the rollout of a bundle from all others in the spool."""
        return self.spool.rollout_key(self.config.run_id, name)

    def claim_place(self, name: BundleName) -> Path:
        """Returns where a bundle stands once it is committed, in a folder that shippers take for this destination.

        Raises:
            OSError: the folder cannot be written.
        """
        self.spool.keep_destination(self.config.run_id, self.config.destination)
        return self.spool.committed(self.config.run_id, name)

    def closing_event(
        self, rollout_id: int, plan: ShardPlan | None, *, dropped_reason: str | None = None, stream: str = TRAIN_STREAM
    ) -> DpShard:
        """Returns the shard's closing event, digests and part counts still empty.

        Args:
            rollout_id: number of the rollout in its stream.
            plan: of the shard; None for a dropped one.
            dropped_reason: why it was dropped.
            stream: another one than the train stream is this rank's alone.
        """
        layout, alone = self.layout, stream != TRAIN_STREAM
        split = layout.context_parallel_size > 1 and not alone
        return DpShard(
            run_id=self.config.run_id,
            attempt=self.attempt,
            stream=stream,
            rollout_id=rollout_id,
            data_parallel_rank=0 if alone else layout.data_parallel_rank,
            data_parallel_size=1 if alone else layout.data_parallel_size,
            rank=layout.rank,
            tensor_parallel_size=layout.tensor_parallel_size,
            pipeline_parallel_size=layout.pipeline_parallel_size,
            context_parallel_size=layout.context_parallel_size,
            context_parallel_layout=self.config.context_parallel_layout if split else "none",
            sample_count=len(plan.records.positions) if plan else 0,
            slot_digests=(),
            part_counts=(),
            raw_bytes=plan.data_bytes if plan else 0,
            replaced_values=plan.records.replaced_values if plan else 0,
            dropped_reason=dropped_reason,
            published_at_ms=_now_ms(),
        )

    def start_bundle(self, name: BundleName, plan: ShardPlan) -> BundleWriter:
        """Returns the bundle to be filled; peers that start the same get the same.

        Raises:
            SpoolFullError: no room.
            SpoolError: it cannot be made.
        """
        return BundleWriter(self.spool.filling(self.config.run_id, name), plan, self.files)

    def set_aside(self) -> int:
        """Returns how many bundles of this rank and attempt could not be shipped."""
        names = self.spool.poisoned(self.config.run_id)
        return sum(name.source in self.own_sources and name.attempt == self.attempt for name in names)

    def waiting(self) -> list[Path]:
        """Returns the bundles of this rank that are still in the spool, marks of dropped rollouts included."""
        bundles = self.spool.bundles_of(self.config.run_id)
        return [path for name, path in bundles if name.source in self.own_sources]


def open_session(config: PublisherConfig, layout: ParallelLayout, control: Control) -> Session:
    """Returns the session that all members agree on; collective over them.

    Raises:
        ProducerError: on all of them, where one has no usable spool.
    """
    try:
        spool = SpoolFolder(config.spool_dir)
        message, problem = _introduction(config, spool), ""
    except (ProducerError, OSError) as exc:
        spool, message, problem = None, [0, 0, 0, 0, 0], str(exc)
    answers = control.exchange(message)
    for member, answer in zip(control.members, answers, strict=True):
        if not answer[0]:
            raise ProducerError(problem or f"rank {member.rank} cannot use its spool; its log says why")
    assert spool is not None  # noqa: S101  # its failure would have been this rank's answer
    placed = [(member, answer[2:]) for member, answer in zip(control.members, answers, strict=True)]
    places = [place for member, place in placed if member.data_parallel_rank == layout.data_parallel_rank]
    here = [member for member, place in placed if place == message[2:] and member.context_parallel_rank == 0]
    return Session(
        config=config,
        layout=layout,
        spool=spool,
        attempt=max(answer[1] for answer in answers),
        files=TensorFiles(spool.pool),
        in_place=_in_place(config, places),
        shards_here=len(here),
        quota=Quota(spool.path, config),
    )


def _introduction(config: PublisherConfig, spool: SpoolFolder) -> list[int]:
    """Returns what this rank tells the others: usable, proposed attempt, and what tells its spool from another."""
    token = spool.token.stat()
    # Mappings of a network file system are not coherent between hosts, so the inode alone does not do.
    host = int(xxhash.xxh3_64_intdigest(_BOOT_ID.read_bytes())) >> 1
    # Stacked and network file systems use all 64 bits of an inode number; the message has 63.
    return [1, _attempt(config, spool), host, token.st_dev, token.st_ino & (2**63 - 1)]


def _attempt(config: PublisherConfig, spool: SpoolFolder) -> int:
    """Returns the attempt that this rank proposes, above all that it can see.

    Raises:
        ProducerError: another trainer publishes the run with an attempt that is not below the configured one.
    """
    living = [trainer.attempt for trainer in living_trainers(spool.run_folder(config.run_id))]
    if living and config.attempt is not None and config.attempt <= max(living):
        raise ProducerError(
            f"another trainer publishes run {config.run_id!r} from {spool.path} as attempt {max(living)}, so attempt "
            f"{config.attempt} is refused: stop it, raise PublisherConfig.attempt, or give the run another run_id"
        )
    if living:
        _log.error(
            "another trainer publishes run %r from %s as attempt %d: this one supersedes it, and of a rollout that "
            "both publish only this one's records count; stop the other, or give one of them another run_id",
            config.run_id,
            spool.path,
            max(living),
        )
    if config.attempt is not None:
        return config.attempt
    earlier = [*living, *(name.attempt for name, _ in spool.bundles_of(config.run_id))]
    return max([_now_ms(), *(past + 1 for past in earlier)])


def _in_place(config: PublisherConfig, places: list[list[int]]) -> bool:
    if config.context_parallel_restore != "auto":
        return config.context_parallel_restore == "in_place"
    return all(place == places[0] for place in places)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
