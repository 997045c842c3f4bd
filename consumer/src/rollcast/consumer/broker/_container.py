"""Apache Kafka in a container, through testcontainers, when a Docker engine answers on this machine."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from typing import TYPE_CHECKING, Any, Final, Literal

from rollcast.consumer.broker._config import LOOPBACK, BrokerConfig, single_node_properties
from rollcast.consumer.broker._jars import KAFKA_VERSION
from rollcast.consumer.broker._ports import free_ports, kafka_answers, port_is_free
from rollcast.consumer.broker.errors import (
    EXTRA_REMEDY,
    BrokerExitedError,
    ContainerUnavailableError,
    PortTakenError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_logger = logging.getLogger(__name__)
IMAGE: Final = f"apache/kafka:{KAFKA_VERSION}"
_DEFAULT_ENGINE: Final = "unix:///var/run/docker.sock"
_ENGINE_TIMEOUT_S: Final = 3
_PROBE_INTERVAL_S: Final = 0.2
_INSIDE_PORT: Final = 9092
_LAST_LINES: Final = 15


def container_environment(config: BrokerConfig, port: int) -> dict[str, str]:
    """Returns the environment of the Apache Kafka image for a broker that clients reach on the loopback port `port`."""
    properties = single_node_properties(config)
    properties |= {
        "listeners": f"PLAINTEXT://0.0.0.0:{_INSIDE_PORT},CONTROLLER://{LOOPBACK}:9093",
        "advertised.listeners": f"PLAINTEXT://{LOOPBACK}:{port}",
        "controller.quorum.voters": f"1@{LOOPBACK}:9093",
    }
    environment = {f"KAFKA_{name.upper().replace('.', '_')}": value for name, value in properties.items()}
    return {**environment, "KAFKA_HEAP_OPTS": f"-Xmx{config.heap_mb}m"}


class ContainerBroker:
    """A Kafka in a container whose port is bound to 127.0.0.1 only; its records go with the container.

    Args:
        config: port, memory and Kafka properties.
        report: takes lines about what is going on, for a person.
    """

    kind: Literal["container"] = "container"

    def __init__(self, config: BrokerConfig, *, report: Callable[[str], None]) -> None:
        self._config = config
        self._report = report
        self._port = config.port if config.port is not None else free_ports(1)[0]
        self._container: Any = None

    @property
    def bootstrap_servers(self) -> str:
        """Address for clients, `127.0.0.1:PORT`."""
        return f"{LOOPBACK}:{self._port}"

    @property
    def description(self) -> str:
        """What this broker is, in words."""
        return f"Apache Kafka {KAFKA_VERSION} in a container"

    def start(self) -> None:
        """Starts the container and returns when its Kafka answers clients.

        Raises:
            ContainerUnavailableError: no engine, an engine elsewhere, or a container that does not come up.
            PortTakenError: somebody else listens on the port.
        """
        if self._config.data_dir is not None:
            # The image runs as a user of its own, who could not write to a folder of the caller's.
            raise ContainerUnavailableError("a container cannot keep its records in a folder given with data_dir")
        try:
            from docker.errors import DockerException  # type: ignore[import-untyped]  # ships no types
            from testcontainers.core.container import DockerContainer
        except ImportError:
            raise ContainerUnavailableError(
                f"the package testcontainers is not installed (run: {EXTRA_REMEDY})"
            ) from None
        _require_local_engine()
        if not port_is_free(self._port):
            raise PortTakenError(self._port)
        self._report(f"Starting {IMAGE} in a container; the first time, its image is fetched")
        try:
            container = DockerContainer(IMAGE, env=container_environment(self._config, self._port))
            ports: dict[str, Any] = container.ports  # its own method can only bind to all addresses
            ports[f"{_INSIDE_PORT}/tcp"] = (LOOPBACK, self._port)
            self._container = container
            container.start()
            self._await_answer()
        except (DockerException, OSError, RuntimeError) as error:
            self.stop()
            raise ContainerUnavailableError(f"the container did not start ({error})") from error
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Removes the container with its records; may be called more than once."""
        container, self._container = self._container, None
        if container is not None:
            container.stop()

    def wait(self) -> None:
        """Blocks until the container ends without having been asked to; a signal handler may break it.

        Raises:
            BrokerExitedError: it ended.
        """
        status = self._container.get_wrapped_container().wait(timeout=None)
        raise BrokerExitedError(f"the container of Kafka ended by itself: {status}")

    def _await_answer(self) -> None:
        deadline = time.monotonic() + self._config.start_timeout_s
        running = self._container.get_wrapped_container()
        while not kafka_answers(self._port):
            running.reload()
            if running.status == "exited":
                last_lines = running.logs(tail=_LAST_LINES).decode("utf-8", errors="replace")
                raise ContainerUnavailableError(f"its Kafka ended; the end of its log:\n{last_lines}")
            if time.monotonic() >= deadline:
                raise ContainerUnavailableError(
                    f"its Kafka does not answer on port {self._port} after {self._config.start_timeout_s:g} s"
                )
            time.sleep(_PROBE_INTERVAL_S)


def _require_local_engine() -> None:
    """Returns if a Docker engine on this machine answers, which is found out without a long wait.

    Raises:
        ContainerUnavailableError: none does.
    """
    from docker.errors import DockerException
    from testcontainers.core.docker_client import DockerClient, get_docker_host

    address = get_docker_host() or _DEFAULT_ENGINE
    if not address.startswith("unix://"):
        raise ContainerUnavailableError(f"the Docker engine {address} is not reached by a socket of this machine")
    try:
        # Asked before docker-py is: that leaves a socket unclosed when nobody listens.
        with socket.socket(socket.AF_UNIX) as knock:
            knock.settimeout(_ENGINE_TIMEOUT_S)
            knock.connect(address.removeprefix("unix://"))
        engine = DockerClient(timeout=_ENGINE_TIMEOUT_S)
        with contextlib.closing(engine.client):
            engine.client.ping()
            host = engine.host()
    except (DockerException, OSError) as error:
        raise ContainerUnavailableError(f"no Docker engine answers on {address} ({error})") from None
    if host != "localhost":  # we are in a container ourselves, and its loopback is not the engine's
        raise ContainerUnavailableError(f"the ports of the Docker engine are not on this machine but on {host}")
