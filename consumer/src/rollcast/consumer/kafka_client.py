"""How the daemon's Kafka clients are made."""

from collections.abc import Callable, Collection
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition

from rollcast.consumer.config import ConsumeConfig

_MAX_PARTITION_FETCH_BYTES = 8 * 1024 * 1024
# Records come one by one while a rollout is shipped, and an answer for each would cost the daemon a tenth of its time.
_WORTH_AN_ANSWER_BYTES = 2 * 1024 * 1024
_MAX_WAIT_MS = 100
# While dumps cannot be written the reader waits, and a member that waits must not lose its partitions for that.
_MAX_POLL_INTERVAL_MS = 3_600_000


def client_options(config: ConsumeConfig) -> dict[str, Any]:
    """Returns the keyword arguments that every aiokafka client of the daemon takes."""
    return {
        "bootstrap_servers": config.bootstrap_servers,
        "client_id": "rollcast-consume",
        **config.security.client_options(),
    }


def group_consumer(
    config: ConsumeConfig,
    *,
    revoked: Callable[[Collection[TopicPartition]], None],
    assigned: Callable[[Collection[TopicPartition]], None],
) -> Any:
    """Returns a consumer of the records topic that commits nothing by itself and tells of each rebalance."""
    consumer = AIOKafkaConsumer(
        **client_options(config),
        group_id=config.group_id,
        enable_auto_commit=False,
        # aiokafka would go to the beginning without a word; the member goes there itself and records what is lost.
        auto_offset_reset="none",
        isolation_level="read_committed",
        session_timeout_ms=config.session_timeout_ms,
        heartbeat_interval_ms=max(1, config.session_timeout_ms // 4),
        max_poll_interval_ms=_MAX_POLL_INTERVAL_MS,
        max_partition_fetch_bytes=_MAX_PARTITION_FETCH_BYTES,
        fetch_min_bytes=_WORTH_AN_ANSWER_BYTES,
        fetch_max_wait_ms=_MAX_WAIT_MS,
        metadata_max_age_ms=config.metadata_max_age_ms,
    )
    consumer.subscribe([config.topics.records], listener=_Listener(revoked, assigned))
    return consumer


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka ships no types
    def __init__(
        self,
        revoked: Callable[[Collection[TopicPartition]], None],
        assigned: Callable[[Collection[TopicPartition]], None],
    ) -> None:
        self._revoked, self._assigned = revoked, assigned

    def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        """Drops their open work."""
        self._revoked(revoked)

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        """Has their positions looked up."""
        self._assigned(assigned)
