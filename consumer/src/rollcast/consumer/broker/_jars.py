"""The jars of Apache Kafka: pinned by content, fetched once from Maven Central, kept in the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rollcast.consumer.broker.errors import BrokerExtraMissingError, JarDownloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jgo.maven import MavenContext

KAFKA_VERSION: Final = "4.2.1"
LOCK_PATH: Final = Path(__file__).with_name("kafka-jars.lock")
_DOWNLOADS_AT_ONCE: Final = 8
_ATTEMPTS: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class LockedJar:
    """One jar and the content it must have.

    Attributes:
        group: Maven group id.
        artifact: Maven artifact id.
        version: Maven version.
        sha256: digest of the file, hex.
    """

    group: str
    artifact: str
    version: str
    sha256: str

    def path_in(self, cache: Path) -> Path:
        """Returns the place of the jar in a folder laid out as a Maven repository."""
        folder = cache.joinpath(*self.group.split("."), self.artifact, self.version)
        return folder / f"{self.artifact}-{self.version}.jar"

    def is_intact_in(self, cache: Path) -> bool:
        """Tells whether the file is there with the pinned content."""
        try:
            return file_sha256(self.path_in(cache)) == self.sha256
        except FileNotFoundError:
            return False


def file_sha256(path: Path) -> str:
    """Returns the digest of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parse_lock(text: str) -> list[LockedJar]:
    """Returns the jars of a lock file: a line is a hash, a blank, `group:artifact:version`; `#` starts a comment."""
    jars = []
    for line in text.splitlines():
        if line and not line.startswith("#"):
            sha256, coordinate = line.split()
            group, artifact, version = coordinate.split(":")
            jars.append(LockedJar(group=group, artifact=artifact, version=version, sha256=sha256))
    return jars


def default_cache() -> Path:
    """Returns the folder of the jars: outside every checkout, so that all of them and their environments share it."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rollcast" / "maven"


def kafka_jars(report: Callable[[str], None]) -> list[Path]:
    """Returns the paths of Kafka's jars, every one with its pinned content; fetches those that are missing or damaged.

    Args:
        report: takes a line of progress; called only when something has to be fetched.

    Raises:
        BrokerExtraMissingError: something has to be fetched and `jgo` is not installed.
        JarDownloadError: it could not be fetched or stored.
    """
    jars = parse_lock(LOCK_PATH.read_text("ascii"))
    cache = default_cache()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _one_process_at_a_time(cache):
            missing = [jar for jar in jars if not jar.is_intact_in(cache)]
            if missing:
                _fetch_all(missing, cache, report)
    except OSError as error:
        raise JarDownloadError(f"the folder of Kafka's jars, {cache}, cannot be used: {error}") from error
    return [jar.path_in(cache) for jar in jars]


@contextmanager
def _one_process_at_a_time(cache: Path) -> Iterator[None]:
    """Keeps two first starts from writing the same files; the kernel frees the lock of a dead process."""
    with (cache / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_all(jars: list[LockedJar], cache: Path, report: Callable[[str], None]) -> None:
    try:
        from jgo.maven import MavenContext
    except ImportError:
        raise BrokerExtraMissingError("jgo") from None
    context = MavenContext(repo_cache=cache)
    report(f"Downloading Apache Kafka {KAFKA_VERSION}, {len(jars)} jars, from Maven Central to {cache}")
    with ThreadPoolExecutor(_DOWNLOADS_AT_ONCE) as pool:
        fetches = [pool.submit(_fetch, context, jar, cache) for jar in jars]
        try:
            for done, fetch in enumerate(as_completed(fetches), start=1):
                fetch.result()
                if done % 20 == 0 or done == len(jars):
                    report(f"  {done} of {len(jars)} jars")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _fetch(context: MavenContext, jar: LockedJar, cache: Path) -> None:
    """Fetches one jar; tries again when the transfer breaks or the content is not the pinned one."""
    name = f"{jar.group}:{jar.artifact}:{jar.version}"
    artifact = context.project(jar.group, jar.artifact).at_version(jar.version).artifact()
    reason: object = None
    for _ in range(_ATTEMPTS):
        # jgo writes to the final name and refuses to replace a file, so what a broken transfer left must go.
        jar.path_in(cache).unlink(missing_ok=True)
        try:
            context.resolver.download(artifact)
        except (OSError, RuntimeError) as error:  # requests' errors are OSErrors
            reason = error
            continue
        if jar.is_intact_in(cache):
            return
        reason = "its content is not the pinned one"
    jar.path_in(cache).unlink(missing_ok=True)
    raise JarDownloadError(
        f"{name} cannot be fetched from Maven Central: {reason}; check the network or the proxy settings "
        "(HTTPS_PROXY; REQUESTS_CA_BUNDLE, a file with the certificates of a proxy that ends TLS) and start again"
    )
