"""Configuration of the shipper."""

from dataclasses import dataclass, field
from pathlib import Path

from rollcast.producer.destination import check_bootstrap_servers, destination_of
from rollcast.producer.errors import ShipperError
from rollcast.schemas.limits import DEFAULT_MAX_PART_BYTES
from rollcast.schemas.parts import MIN_PART_BYTES
from rollcast.schemas.topics import Topics


@dataclass(frozen=True, kw_only=True, slots=True)
class ShipperConfig:
    """What `rollcast-ship` needs to know.

    Attributes:
        spool_dir: the spool to empty.
        bootstrap_servers: Kafka's address, `host:port[,host:port]`.
        topics: names of the topics.
        max_part_bytes: largest Kafka record.
        max_in_flight_bytes: records handed to the client and not yet acknowledged.
        delivery_timeout_ms: a record not acknowledged for this long makes the bundle be sent anew.
        retry_max_s: longest pause between two tries while Kafka is away.
        partitions: of the records topic, where it must be created.
        replication_factor: of the same.
        only_matching_runs: ships only runs that are published for this address and prefix.
        stop_with_trainers: ends when the spool is empty and no trainer uses it.
    """

    spool_dir: Path
    bootstrap_servers: str
    topics: Topics = field(default_factory=Topics)
    max_part_bytes: int = DEFAULT_MAX_PART_BYTES
    max_in_flight_bytes: int = 32 * 1024**2
    delivery_timeout_ms: int = 30_000
    retry_max_s: float = 10.0
    partitions: int = 4
    replication_factor: int = 1
    only_matching_runs: bool = False
    stop_with_trainers: bool = False

    def __post_init__(self) -> None:
        """Refuses values that cannot work."""
        if not self.bootstrap_servers:
            raise ShipperError("no Kafka address: give --bootstrap host:port or set ROLLCAST_BOOTSTRAP_SERVERS")
        check_bootstrap_servers(self.bootstrap_servers)
        if self.max_part_bytes < MIN_PART_BYTES:
            raise ShipperError(f"max_part_bytes is {self.max_part_bytes}; it must be at least {MIN_PART_BYTES}")
        for name in ("max_in_flight_bytes", "delivery_timeout_ms", "retry_max_s", "partitions", "replication_factor"):
            if getattr(self, name) <= 0:
                raise ShipperError(f"{name} is {getattr(self, name)}; it must be positive")

    @property
    def destination(self) -> str | None:
        """The destination whose runs are shipped; None: all runs of the spool."""
        if not self.only_matching_runs:
            return None
        return destination_of(self.bootstrap_servers, self.topics.prefix)
