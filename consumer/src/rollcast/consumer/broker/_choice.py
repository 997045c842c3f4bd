"""Which broker to use: the one that is named, else a container, else Kafka on a JVM."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal, Protocol

from rollcast.consumer.broker._config import LOOPBACK, BrokerConfig
from rollcast.consumer.broker._container import ContainerBroker
from rollcast.consumer.broker._jvm import JvmBroker
from rollcast.consumer.broker._ports import kafka_answers, port_is_free
from rollcast.consumer.broker.errors import (
    BrokerConfigError,
    BrokerError,
    ContainerUnavailableError,
    DataFolderTakenError,
    NoBrokerError,
    PortTakenError,
)
from rollcast.schemas.addresses import check_bootstrap_servers
from rollcast.schemas.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BOOTSTRAP_VARIABLE: Final = "ROLLCAST_BOOTSTRAP_SERVERS"
_logger = logging.getLogger(__name__)
_DEFAULT_CONFIG: Final = BrokerConfig()


class Broker(Protocol):
    """A Kafka that answers clients; whoever uses it need not know how it came to be."""

    @property
    def kind(self) -> Literal["external", "container", "jvm"]:
        """How it came to be; an external one is not ours to stop."""
        ...

    @property
    def bootstrap_servers(self) -> str:
        """Address for clients."""
        ...

    @property
    def description(self) -> str:
        """What it is, in words."""
        ...

    def wait(self) -> None:
        """Blocks until the broker ends without having been asked to; returns only for one that is not ours to watch.

        Raises:
            BrokerExitedError: it ended.
        """
        ...


class ExternalBroker:
    """The broker that the environment names; Rollcast neither starts nor stops it."""

    kind: Literal["external"] = "external"

    def __init__(self, bootstrap_servers: str) -> None:
        self.bootstrap_servers = bootstrap_servers

    @property
    def description(self) -> str:
        """What this broker is, in words."""
        return f"the broker named in {BOOTSTRAP_VARIABLE}"

    def answers(self) -> bool:
        """Tells whether a Kafka answers at one of the addresses; blocks for a few seconds at most for each."""
        return any(_answers(address.strip()) for address in self.bootstrap_servers.split(","))

    def wait(self) -> None:
        """Returns at once: the end of somebody else's broker is not ours to watch."""


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return kafka_answers(int(port), host.strip("[]"))


@contextmanager
def running_broker(
    config: BrokerConfig = _DEFAULT_CONFIG, *, report: Callable[[str], None] = _logger.info
) -> Iterator[Broker]:
    """Yields a broker that answers clients for the time of the `with` block.

    Tried in this order: the address in `ROLLCAST_BOOTSTRAP_SERVERS` (taken as it is; `config` does not reach it),
    a container when a Docker engine answers on this machine, Apache Kafka on a JVM. Blocks while it starts. If that
    address is a port of this machine on which nobody listens, and `config` names no other, one is started there.

    Args:
        config: port, folder, memory and Kafka properties of a broker of our own.
        report: takes lines about what is going on, for a person.

    Raises:
        BrokerConfigError: `ROLLCAST_BOOTSTRAP_SERVERS` is no address.
        NoBrokerError: no way works; the message has each way, why it failed, and what to do.
        PortTakenError: somebody else listens on the port in `config`.
        DataFolderTakenError: another broker keeps its records in the folder in `config`.
    """
    named = os.environ.get(BOOTSTRAP_VARIABLE)
    if named:
        try:
            check_bootstrap_servers(named)
        except ContractError as error:
            raise BrokerConfigError(str(error)) from None
        port = _free_port_at(named)
        if port is None or config.port not in (None, port):
            yield ExternalBroker(named)
            return
        report(f"Nobody listens at {named}, which {BOOTSTRAP_VARIABLE} names, so the broker is started there")
        config = replace(config, port=port)
    broker = _start_own(config, report, f"names {named}, where nobody listens" if named else "not set")
    try:
        yield broker
    finally:
        broker.stop()


def _free_port_at(address: str) -> int | None:
    """Returns the port where this machine's own broker would have this address; None where none can or one has."""
    host, _, port = address.strip().rpartition(":")
    return int(port) if host in (LOOPBACK, "localhost") and port_is_free(int(port)) else None


def _start_own(config: BrokerConfig, report: Callable[[str], None], no_named: str) -> ContainerBroker | JvmBroker:
    container = ContainerBroker(config, report=report)
    try:
        container.start()
    except ContainerUnavailableError as error:
        no_container = str(error)
    else:
        return container
    jvm = JvmBroker(config, report=report)
    try:
        jvm.start()
    except (PortTakenError, DataFolderTakenError):
        raise
    except BrokerError as error:
        attempts = [
            (BOOTSTRAP_VARIABLE, no_named),
            ("container", no_container),
            ("Kafka on a JVM", str(error)),
        ]
        raise NoBrokerError(attempts, variable=BOOTSTRAP_VARIABLE) from error
    return jvm
