"""How much a spool holds."""

import contextlib
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollcast.producer.spool.folder import BundleName
from rollcast.producer.spool.read import TENSORS_NAME
from rollcast.schemas.sizes import counted

# A bundle that is committed or shipped during the walk makes the walk be done again.
_TRIES = 3


@dataclass(frozen=True, slots=True)
class SpoolUsage:
    """What the bundles of a spool take, finished or not; pool and poison left aside.

    Attributes:
        size: bytes of their files.
        bundles: number of bundles with content.
        marks: number of bundles without, each the mark of a dropped rollout.
    """

    size: int = 0
    bundles: int = 0
    marks: int = 0

    def __add__(self, other: "SpoolUsage") -> "SpoolUsage":
        """Adds each number."""
        return SpoolUsage(self.size + other.size, self.bundles + other.bundles, self.marks + other.marks)

    def __sub__(self, other: "SpoolUsage") -> "SpoolUsage":
        """Subtracts each number."""
        return SpoolUsage(self.size - other.size, self.bundles - other.bundles, self.marks - other.marks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """What one walk through a spool has found.

    Attributes:
        usage: of all bundles.
        committed: number of bundles that wait for Kafka, marks included.
        recent: of those that the walk before had not found committed, by `SpoolFolder.rollout_key`.
    """

    usage: SpoolUsage
    committed: int
    recent: Mapping[str, SpoolUsage]


class SpoolMeter:
    """Measures a spool again and again. What is committed does not change, so it is looked into once.

    For one thread at a time.

    Args:
        root: the spool folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = os.fspath(root)
        # By path and inode: a name may come again.
        self._committed: dict[tuple[str, int], SpoolUsage] = {}

    def measure(self) -> Measurement:
        """Returns what the spool holds, found by listing it, so it is right whoever filled it and whenever."""
        found, committed, is_stable = self._walk()
        for _ in range(_TRIES - 1):
            if is_stable:
                break
            found, committed, is_stable = self._walk()
        self._committed = committed
        return found

    def _walk(self) -> tuple[Measurement, dict[tuple[str, int], SpoolUsage], bool]:
        """Returns what is there, and whether none has gone or been renamed before it was looked at."""
        committed: dict[tuple[str, int], SpoolUsage] = {}
        recent: defaultdict[str, SpoolUsage] = defaultdict(SpoolUsage)
        size = bundles = marks = 0
        is_stable = True
        for run in _folders(self._root):
            for bundle in _folders(run.path) if not run.name.startswith(".") else ():
                key = (bundle.path, bundle.inode())
                usage = self._committed.get(key)
                if usage is None:
                    try:
                        usage = _look_into(bundle)
                    except FileNotFoundError:
                        is_stable = False
                        continue
                    except OSError:
                        # Another user's is not counted: a trainer must not stop for it.
                        continue
                    if (rollout := _rollout_of(bundle.name)) is not None:
                        recent[f"{run.name}/{rollout}"] += usage
                if not bundle.name.startswith("."):
                    committed[key] = usage
                # Not added up as objects: there may be ten thousand.
                size += usage.size
                bundles += usage.bundles
                marks += usage.marks
        found = Measurement(usage=SpoolUsage(size, bundles, marks), committed=len(committed), recent=recent)
        return found, committed, is_stable


def is_mark(bundle: Path) -> bool:
    """Tells whether a committed bundle has no content: it is the mark of a dropped rollout."""
    return not (bundle / TENSORS_NAME).exists()


def bundles_in_words(bundles: Sequence[Path]) -> str:
    """Returns how many of these committed bundles have content, and how many are marks."""
    marks = sum(map(is_mark, bundles))
    return counted_bundles(len(bundles) - marks, marks)


def counted_bundles(bundles: int, marks: int) -> str:
    """Returns how many bundles and marks of dropped rollouts there are; a mark is a bundle too, but nobody's data."""
    if not marks:
        return counted(bundles, "bundle")
    told = counted(marks, "drop mark")
    return f"{counted(bundles, 'bundle')} and {told}" if bundles else told


def _look_into(bundle: os.DirEntry[str]) -> SpoolUsage:
    with os.scandir(bundle.path) as entries:
        files = {entry.name: entry.stat().st_size for entry in entries}
    has_content = TENSORS_NAME in files
    is_committed = not bundle.name.startswith(".")
    return SpoolUsage(sum(files.values()), int(has_content), int(is_committed and not has_content))


def _rollout_of(folder: str) -> str | None:
    # Unfinished ones are the name between a dot and what is being done with them.
    name = BundleName.parse(folder.removeprefix(".").partition(".")[0])
    return name.rollout if name is not None else None


def _folders(path: str) -> list[os.DirEntry[str]]:
    # Listed at once: what is renamed meanwhile must not be found twice, or not at all.
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []
