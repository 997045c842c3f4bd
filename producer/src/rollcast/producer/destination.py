"""Where a run's records go: Kafka's address and the topic prefix."""

from rollcast.producer.errors import ProducerError


def destination_of(bootstrap_servers: str, topic_prefix: str) -> str:
    """Returns the name of a destination."""
    return f"{topic_prefix}@{bootstrap_servers}"


def check_bootstrap_servers(addresses: str) -> None:
    """Returns if the addresses have the form `host:port[,host:port]`.

    Raises:
        ProducerError: they have not.
    """
    for address in addresses.split(","):
        host, _, port = address.strip().rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
            raise ProducerError(
                f"bootstrap_servers is {addresses!r}; it needs Kafka's address as host:port[,host:port]"
            )
