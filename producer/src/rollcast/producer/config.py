"""Configuration of the publisher."""

from dataclasses import dataclass
from pathlib import Path

from rollcast.producer.context_parallel import ContextLayout
from rollcast.producer.errors import ProducerError
from rollcast.producer.spool.folder import destination_of
from rollcast.schemas.addresses import check_bootstrap_servers
from rollcast.schemas.limits import DEFAULT_MAX_PART_BYTES
from rollcast.schemas.parts import MIN_PART_BYTES
from rollcast.schemas.topics import Topics, check_run_id

_POSITIVE = ("max_spool_bytes", "max_spool_bundles", "gather_bucket_bytes", "control_timeout_s", "commit_timeout_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class PublisherConfig:
    """What a `Publisher` needs to know; the same on every rank.

    Attributes:
        run_id: name of the training run; stays the same when the run resumes.
        spool_dir: folder for bundles that wait for Kafka, on a local disk or tmpfs; shared by the ranks of a host.
        bootstrap_servers: Kafka's address, `host:port[,host:port]`.
        topic_prefix: first part of the topic names.
        attempt: the scheduler's restart count; default: milliseconds at start, above any attempt in the spool.
        max_part_bytes: largest Kafka record; the broker's `max.message.bytes` must be a little larger.
        max_spool_bytes: bytes of bundles that the spool may hold, all runs together; keep it below the disk's size.
        max_spool_bundles: number of bundles that it may hold.
        block_up_to_s: longest that `publish` waits for room in a full spool, before it drops the rollout whole.
        fsync: `none`, or `background`: committed bundles survive a power cut; of no use on tmpfs.
        context_parallel_layout: how sequences are cut, one of `ContextLayout`.
        context_parallel_restore: `auto`, or force `in_place` or `gather`.
        gather_bucket_bytes: size of one message where peers cannot share the spool.
        control_timeout_s: a peer that does not answer for this long stops publishing for good, not the training.
        commit_timeout_s: a peer that does not fill its part for this long makes the rollout a dropped one.
        start_shipper: the writer starts `rollcast-ship`; switch off when a sidecar does it.
        strict: errors are raised from `publish`; for tests.
    """

    run_id: str
    spool_dir: Path | str
    bootstrap_servers: str
    topic_prefix: str = "rollcast"
    attempt: int | None = None
    max_part_bytes: int = DEFAULT_MAX_PART_BYTES
    max_spool_bytes: int = 64 * 1024**3
    max_spool_bundles: int = 10_000
    block_up_to_s: float = 0.0
    fsync: str = "none"
    context_parallel_layout: str = ContextLayout.ZIGZAG_THD
    context_parallel_restore: str = "auto"
    gather_bucket_bytes: int = 64 * 1024**2
    control_timeout_s: float = 60.0
    commit_timeout_s: float = 120.0
    start_shipper: bool = True
    strict: bool = False

    def __post_init__(self) -> None:
        """Refuses values that cannot work."""
        check_run_id(self.run_id)
        Topics(self.topic_prefix)
        check_bootstrap_servers(self.bootstrap_servers)
        if self.max_part_bytes < MIN_PART_BYTES:
            raise ProducerError(
                f"PublisherConfig.max_part_bytes is {self.max_part_bytes}; it must be at least {MIN_PART_BYTES}"
            )
        if self.context_parallel_restore not in {"auto", "in_place", "gather"}:
            raise ProducerError(
                f"PublisherConfig.context_parallel_restore is {self.context_parallel_restore!r}; "
                "use auto, in_place or gather"
            )
        if self.context_parallel_layout not in set(ContextLayout):
            raise ProducerError(
                f"PublisherConfig.context_parallel_layout is {self.context_parallel_layout!r}; "
                f"known are {', '.join(ContextLayout)}"
            )
        if self.attempt is not None and not 0 <= self.attempt < 2**63:
            raise ProducerError(f"PublisherConfig.attempt is {self.attempt}; it must not be negative")
        if self.fsync not in {"none", "background"}:
            raise ProducerError(f"PublisherConfig.fsync is {self.fsync!r}; use none or background")
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ProducerError(f"PublisherConfig.{name} is {getattr(self, name)}; it must be positive")
        # The others wait in the collective meanwhile.
        if not 0 <= self.block_up_to_s <= self.control_timeout_s / 2:
            raise ProducerError(
                f"PublisherConfig.block_up_to_s is {self.block_up_to_s:g}; it must be from 0 to half of "
                f"control_timeout_s, which is {self.control_timeout_s:g}"
            )

    @property
    def destination(self) -> str:
        """Names where the run's records go, so that one spool can serve several."""
        return destination_of(self.bootstrap_servers, self.topic_prefix)
