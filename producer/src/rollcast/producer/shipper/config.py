"""Configuration of the shipper."""

from dataclasses import dataclass, field

from rollcast.producer.errors import ShipperError
from rollcast.producer.spool.folder import destination_of
from rollcast.schemas.addresses import check_bootstrap_servers
from rollcast.schemas.kafka_security import KafkaSecurity
from rollcast.schemas.limits import DEFAULT_LIMITS, DEFAULT_MAX_PART_BYTES
from rollcast.schemas.parts import MIN_PART_BYTES
from rollcast.schemas.topics import Topics


@dataclass(frozen=True, kw_only=True, slots=True)
class ShipperConfig:
    """What `rollcast-ship` needs to know; the same for all its spools.

    Attributes:
        bootstrap_servers: Kafka's address, `host:port[,host:port]`.
        topics: names of the topics.
        security: how to log in.
        max_part_bytes: largest Kafka record.
        compress_threads: threads that cut and compress, for all spools together; several mostly wait for each other.
        max_ahead_bytes: raw bytes of a spool that may be cut before the client takes them; one sample may be larger.
        max_in_flight_bytes: records of a spool handed to the client and not yet acknowledged.
        max_open_bundles: bundles of a spool that wait for acknowledgements while the next one is sent.
        request_timeout_ms: longest wait for one answer of a broker.
        delivery_timeout_ms: a bundle of which nothing is acknowledged for this long is sent anew by a new client.
        retry_max_s: longest pause between two tries while Kafka is away.
        create_topics: whether the records topic is created where it is missing.
        partitions: of the records topic, where it must be created.
        replication_factor: of the same.
        only_matching_runs: ships only runs that are published for this address and prefix.
        stop_with_trainers: ends when the spools are empty and no trainer uses them.
        metrics_port: of the HTTP server for metrics and health; None: none.
        metrics_host: its address.
    """

    bootstrap_servers: str
    topics: Topics = field(default_factory=Topics)
    security: KafkaSecurity = field(default_factory=KafkaSecurity)
    max_part_bytes: int = DEFAULT_MAX_PART_BYTES
    compress_threads: int = 1
    max_ahead_bytes: int = 16 * 1024**2
    max_in_flight_bytes: int = 32 * 1024**2
    max_open_bundles: int = 4
    request_timeout_ms: int = 30_000
    delivery_timeout_ms: int = 120_000
    retry_max_s: float = 10.0
    create_topics: bool = True
    partitions: int = 4
    replication_factor: int = 1
    only_matching_runs: bool = False
    stop_with_trainers: bool = False
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        """Refuses values that cannot work."""
        if not self.bootstrap_servers:
            raise ShipperError("no Kafka address: give --bootstrap host:port or set ROLLCAST_BOOTSTRAP_SERVERS")
        check_bootstrap_servers(self.bootstrap_servers)
        if not MIN_PART_BYTES <= self.max_part_bytes <= DEFAULT_LIMITS.max_message_bytes:
            raise ShipperError(
                f"max_part_bytes is {self.max_part_bytes}; it must be {MIN_PART_BYTES} to "
                f"{DEFAULT_LIMITS.max_message_bytes}, which is the most that consumers take"
            )
        positive = (
            "compress_threads",
            "max_ahead_bytes",
            "max_in_flight_bytes",
            "max_open_bundles",
            "request_timeout_ms",
            "delivery_timeout_ms",
            "retry_max_s",
            "partitions",
            "replication_factor",
        )
        for name in positive:
            if getattr(self, name) <= 0:
                raise ShipperError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.metrics_port is not None and not 0 <= self.metrics_port < 65_536:
            raise ShipperError(f"metrics_port is {self.metrics_port}; it must be 0 (any free one) to 65535")

    @property
    def destination(self) -> str | None:
        """The destination whose runs are shipped; None: all runs of a spool."""
        if not self.only_matching_runs:
            return None
        return destination_of(self.bootstrap_servers, self.topics.prefix)

    @property
    def is_started_by_trainer(self) -> bool:
        """Whether trainers look after this shipper, and start another one when it ends."""
        return self.only_matching_runs and self.stop_with_trainers
