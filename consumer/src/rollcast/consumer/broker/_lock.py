"""Writes `kafka-jars.lock` anew; for the day on which Kafka's version is raised.

Run `python -m rollcast.consumer.broker._lock` after changing `KAFKA_VERSION`; needs the network.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

import jgo
from jgo.maven import MavenContext

from rollcast.consumer.broker._jars import KAFKA_VERSION, LOCK_PATH, file_sha256

# Kafka logs through SLF4J 1.7 and carries log4j 2; this binds the first to the second, else the log is lost.
# The "!" keeps that project's own dependency management, which names an old Kafka, out of the resolution.
_SLF4J_BACKEND: Final = "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4!"
_COORDINATES: Final = (
    f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}+org.apache.kafka:kafka-tools:{KAFKA_VERSION}+{_SLF4J_BACKEND}"
)


def main() -> None:
    """Resolves Kafka's dependencies, fetches every jar once and writes its hash to the lock file."""
    lines = [f"# Written by python -m rollcast.consumer.broker._lock from {_COORDINATES}"]
    with tempfile.TemporaryDirectory() as folder:
        context = MavenContext(repo_cache=Path(folder))
        for found in sorted(jgo.resolve(_COORDINATES), key=str):
            artifact = context.project(found.groupId, found.artifactId).at_version(found.version).artifact()
            coordinate = f"{found.groupId}:{found.artifactId}:{found.version}"
            lines.append(f"{file_sha256(artifact.resolve())} {coordinate}")
    LOCK_PATH.write_text("\n".join(lines) + "\n", "ascii")


if __name__ == "__main__":
    main()
