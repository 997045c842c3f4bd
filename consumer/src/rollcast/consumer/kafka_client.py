"""What the daemon's Kafka clients have in common."""

from typing import Any

from rollcast.consumer.config import ConsumeConfig


def client_options(config: ConsumeConfig) -> dict[str, Any]:
    """Returns the keyword arguments that every aiokafka client of the daemon takes."""
    return {"bootstrap_servers": config.bootstrap_servers, "client_id": "rollcast-consume"}
