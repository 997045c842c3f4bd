"""How much a spool holds."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from rollcast.producer.spool.read import TENSORS_NAME

# A bundle that is committed or shipped during the walk makes the walk be done again.
_TRIES = 3


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
    found, changed = _walk(os.fspath(root), besides)
    for _ in range(_TRIES - 1):
        if not changed:
            break
        found, changed = _walk(os.fspath(root), besides)
    return found


def _walk(root: str, besides: str | None) -> tuple[SpoolUsage, bool]:
    """Returns what is there, and whether a bundle has gone or been renamed before it was looked at."""
    size = bundles = 0
    changed = False
    for run in _folders(root):
        for bundle in _folders(run) if not Path(run).name.startswith(".") else ():
            if besides is not None and bundle.startswith(besides):
                continue
            try:
                with os.scandir(bundle) as entries:
                    files = [(entry.name, entry.stat().st_size) for entry in entries]
            except FileNotFoundError:
                changed = True
            except OSError:
                # Another user's is not counted: a trainer must not stop for it.
                continue
            else:
                size += sum(file_size for _, file_size in files)
                bundles += any(name == TENSORS_NAME for name, _ in files)
    return SpoolUsage(size, bundles), changed


def _folders(path: str) -> list[str]:
    # Listed at once: what is renamed meanwhile must not be found twice, or not at all.
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []
