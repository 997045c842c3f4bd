"""Where a run's records go: Kafka's address and the topic prefix."""


def destination_of(bootstrap_servers: str, topic_prefix: str) -> str:
    """Returns the name of a destination."""
    return f"{topic_prefix}@{bootstrap_servers}"
