"""A real Apache Kafka from nothing, for tests, the demo and a first try: one node, loopback only."""

from rollcast.consumer.broker._choice import BOOTSTRAP_VARIABLE, Broker, ExternalBroker, running_broker
from rollcast.consumer.broker._config import BrokerConfig
from rollcast.consumer.broker._container import ContainerBroker
from rollcast.consumer.broker._jvm import JvmBroker
from rollcast.consumer.broker.errors import (
    BrokerConfigError,
    BrokerError,
    BrokerExitedError,
    BrokerExtraMissingError,
    BrokerStartError,
    ContainerUnavailableError,
    DataFolderTakenError,
    JarDownloadError,
    JavaNotFoundError,
    NoBrokerError,
    PortTakenError,
)

__all__ = [
    "BOOTSTRAP_VARIABLE",
    "Broker",
    "BrokerConfig",
    "BrokerConfigError",
    "BrokerError",
    "BrokerExitedError",
    "BrokerExtraMissingError",
    "BrokerStartError",
    "ContainerBroker",
    "ContainerUnavailableError",
    "DataFolderTakenError",
    "ExternalBroker",
    "JarDownloadError",
    "JavaNotFoundError",
    "JvmBroker",
    "NoBrokerError",
    "PortTakenError",
    "running_broker",
]
