"""How much a spool holds."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollcast.producer.spool.read import TENSORS_NAME


@dataclass(frozen=True, slots=True)
class SpoolUsage:
    """What the bundles of a spool take, finished or not; pool and poison left aside.

    Attributes:
        size: bytes of their files.
        bundles: number of bundles with content; the marks of dropped rollouts do not count.
    """

    size: int = 0
    bundles: int = 0


def measure_spool(root: Path, besides: str | None = None) -> SpoolUsage:
    """Returns what the spool holds, found by walking it, so it is right whoever filled it and whenever.

    Args:
        root: the spool folder.
        besides: how the paths of bundles begin that are not to be counted.
    """
    size = bundles = 0
    for run in _folders(os.fspath(root)):
        if run.name.startswith("."):
            continue
        for bundle in _folders(run.path):
            if besides is None or not bundle.path.startswith(besides):
                for file in _entries(bundle.path):
                    # A bundle may be shipped and removed while it is being measured.
                    with contextlib.suppress(OSError):
                        size += file.stat().st_size
                        bundles += file.name == TENSORS_NAME
    return SpoolUsage(size, bundles)


def _folders(path: str) -> Iterator[os.DirEntry[str]]:
    return (entry for entry in _entries(path) if entry.is_dir(follow_symlinks=False))


def _entries(path: str) -> Iterator[os.DirEntry[str]]:
    # What is gone by now, or another user's, is not counted: a trainer must not stop for it.
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        yield from entries
