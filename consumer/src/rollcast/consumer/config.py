"""Settings of the daemon."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from rollcast.consumer.errors import ConsumeConfigError
from rollcast.consumer.retention import Retention
from rollcast.consumer.template import PathTemplate
from rollcast.schemas import DEFAULT_LIMITS, Limits, Topics
from rollcast.schemas.addresses import check_bootstrap_servers
from rollcast.schemas.kafka_security import KafkaSecurity

_OPTIONS = {
    "bootstrap_servers": "--bootstrap",
    "dump_path": "--dump-path",
    "group_id": "--group",
    "partitions": "--partitions",
    "replication_factor": "--replication-factor",
    "incomplete_after_s": "--incomplete-after-s",
    "max_resident_bytes": "--max-resident-bytes",
    "scratch_dir": "--scratch-dir",
    "max_scratch_bytes": "--max-scratch-bytes",
    "connect_timeout_s": "--connect-timeout-s",
    "shutdown_timeout_s": "--shutdown-timeout-s",
    "stall_after_s": "--stall-after-s",
    "http_port": "--http-port",
    "http_host": "--http-host",
}


class Layout(StrEnum):
    """Whose tools read the dumps."""

    SLIME = "slime"
    """One v2 file for each rollout."""
    MILES = "miles"
    """One file for each shard, named with `{rank}`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsumeConfig:
    """Settings of `Daemon`.

    Attributes:
        bootstrap_servers: addresses of the Kafka cluster, `host:port`, comma-separated.
        dump_path: path template with `{run_id}` and `{rollout_id}`, which may be padded, `{rollout_id:06d}`; its file
            name ends with `.pt`, and may have `{rank}` and `{attempt}`.
        layout: of the dumps' files.
        retention: which dumps are removed.
        topics: names of the topics.
        group_id: consumer group; members of one group share the partitions.
        create_topics: whether topics that do not exist are created.
        partitions: of the records topic, when it is created.
        replication_factor: of topics that are created.
        incomplete_after_s: a rollout without a new record for so long is written as incomplete. The time in which Kafka
            is away, or not everything is read, does not count.
        max_resident_bytes: cap on the memory of the records held, about, without their tensors; when it is reached,
            the rollout that has waited longest is written as incomplete.
        scratch_dir: folder of the files that hold the tensors of unfinished rollouts; by default the part of
            `dump_path` that does not depend on the run.
        max_scratch_bytes: cap on the size of these files; when it is reached, reading waits for dumps that are being
            written, and without any the rollout that has waited longest is written as incomplete. A part whose
            tensors take more than a quarter of it is a dead letter.
        connect_timeout_s: bound on reaching a broker at start.
        shutdown_timeout_s: bound on a graceful shutdown.
        session_timeout_ms: the group gives a member's partitions away when it was silent for so long.
        metadata_max_age_ms: how soon added partitions are noticed.
        stall_after_s: a Kafka client that brings nothing for so long, though there is something to read, is replaced.
        http_port: where metrics and health are served; 0 for any free port, None for nowhere.
        http_host: address of that port; on another one than loopback, whoever reaches it can read them.
        limits: caps on what a record may claim.
        security: how to log in to Kafka.

    Raises:
        ConsumeConfigError: a value cannot work; a `TemplateError` where it is `dump_path`.
    """

    bootstrap_servers: str
    dump_path: str
    layout: Layout = Layout.SLIME
    retention: Retention = field(default_factory=Retention)
    topics: Topics = field(default_factory=Topics)
    group_id: str = "rollcast"
    create_topics: bool = True
    partitions: int = 4
    replication_factor: int = 1
    incomplete_after_s: float = 600.0
    max_resident_bytes: int = 256 * 1024**2
    scratch_dir: str = ""
    max_scratch_bytes: int = 64 * 1024**3
    connect_timeout_s: float = 15.0
    shutdown_timeout_s: float = 30.0
    session_timeout_ms: int = 10_000
    metadata_max_age_ms: int = 5_000
    stall_after_s: float = 120.0
    http_port: int | None = None
    http_host: str = "127.0.0.1"
    limits: Limits = DEFAULT_LIMITS
    security: KafkaSecurity = field(default_factory=KafkaSecurity)

    def __post_init__(self) -> None:
        """Refuses values that cannot work."""
        for name in ("bootstrap_servers", "dump_path", "group_id", "http_host"):
            if not getattr(self, name):
                raise ConsumeConfigError(f"{_named(name)} is empty; give it a value")
        check_bootstrap_servers(self.bootstrap_servers)
        PathTemplate(self.dump_path, several_files=self.layout is Layout.MILES)
        positive = (
            "partitions",
            "replication_factor",
            "incomplete_after_s",
            "max_resident_bytes",
            "max_scratch_bytes",
            "connect_timeout_s",
            "shutdown_timeout_s",
            "session_timeout_ms",
            "metadata_max_age_ms",
            "stall_after_s",
        )
        for name in positive:
            if not getattr(self, name) > 0:
                raise ConsumeConfigError(f"{_named(name)} is {getattr(self, name)}; it must be above 0")
        if self.http_port is not None and not 0 <= self.http_port <= 65535:
            raise ConsumeConfigError(f"{_named('http_port')} is {self.http_port}; it must be a port, 0 to 65535")

    @property
    def scratch_directory(self) -> Path:
        """The folder of the scratch files."""
        return Path(self.scratch_dir) if self.scratch_dir else fixed_directory(self.dump_path)


def fixed_directory(template: str) -> Path:
    """Returns the folder that a path template stands in, whatever the values of its fields."""
    return Path(template.partition("{")[0] + "x").parent


def _named(name: str) -> str:
    """Returns the field with the option of `rollcast consume` that sets it, if there is one."""
    return f"{name} ({_OPTIONS[name]})" if name in _OPTIONS else name
