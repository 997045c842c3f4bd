"""What a local broker may be told, and what Kafka is told in turn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from rollcast.consumer.broker.errors import BrokerConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LOOPBACK: Final = "127.0.0.1"
SMALLEST_HEAP_MB: Final = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokerConfig:
    """How a local broker runs; the defaults suit tests and the demo.

    Attributes:
        data_dir: folder of records, settings and log; None: a temporary one, removed by `stop()`.
        port: on 127.0.0.1; None: a free one, kept over restarts of the same object.
        heap_mb: upper bound of the JVM's heap; the process takes about 150 MB beyond it.
        start_timeout_s: from the start of the process until it must answer clients.
        properties: further ones of Kafka; they win over Rollcast's own, but for listeners, quorum and folders.

    Raises:
        BrokerConfigError: a value no broker could run with.
    """

    data_dir: Path | None = None
    port: int | None = None
    heap_mb: int = 512
    start_timeout_s: float = 120.0
    properties: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.port is not None and not 0 < self.port < 65536:
            raise BrokerConfigError(f"port is {self.port}; give one from 1 to 65535, or None for a free one")
        if self.heap_mb < SMALLEST_HEAP_MB:
            raise BrokerConfigError(f"heap_mb is {self.heap_mb}; Kafka needs {SMALLEST_HEAP_MB} or more")
        if not self.start_timeout_s > 0:
            raise BrokerConfigError(f"start_timeout_s is {self.start_timeout_s}; give more than 0 seconds")
        for name, value in self.properties.items():
            if not name or any(character in name + value for character in "\r\n"):
                raise BrokerConfigError(f"property {name!r} has the value {value!r}; both must be one line")


def single_node_properties(config: BrokerConfig) -> dict[str, str]:
    """Returns the Kafka server properties of a one-node cluster, all but listeners, quorum and folders.

    One replica of everything, no topic made by accident, groups that start at once.
    """
    return {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "auto.create.topics.enable": "false",
        "default.replication.factor": "1",
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "4",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "group.initial.rebalance.delay.ms": "0",
        # After a SIGKILL the controller refuses the restarted broker until the session of the dead one has
        # run out; Kafka's 9 s would be added to every such restart.
        "broker.session.timeout.ms": "3000",
        "broker.heartbeat.interval.ms": "500",
        # On the heap; Kafka's 128 MB would be a quarter of it.
        "log.cleaner.dedupe.buffer.size": str(16 * 1024 * 1024),
        **config.properties,
    }
