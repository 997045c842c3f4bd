"""The seam between the daemon and the place where dumps are kept."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rollcast.consumer.config import Layout
from rollcast.consumer.layout import DumpFile, files_of
from rollcast.consumer.metrics import Measuring
from rollcast.consumer.rollout import Missing, OffsetSpan, Rollout, RolloutKey
from rollcast.consumer.store.manifest import Manifest
from rollcast.schemas import TRAIN_STREAM


@dataclass(frozen=True, kw_only=True, slots=True)
class Dump:
    """A restored rollout, ready to be kept.

    Attributes:
        rollout: where it came from.
        files: what is kept, at least one file; each has a rank of its own.
        sample_count: samples in all files.
        missing: what it lacks; empty for a complete dump.
        measuring: computes its metrics; None if it has none.
        gaps: offsets of its partitions that could not be read, where something is missing.
    """

    rollout: Rollout
    files: tuple[DumpFile, ...]
    sample_count: int
    missing: Missing
    measuring: Measuring | None
    gaps: tuple[OffsetSpan, ...] = ()


def dump_of(rollout: Rollout, payload: Mapping[str, Any], missing: Missing, layout: Layout) -> Dump:
    """Returns the dump of a rollout that was restored to this payload.

    Raises:
        LayoutError: the layout cannot hold it.
    """
    trained, samples = rollout.id.stream == TRAIN_STREAM, payload["samples"]
    return Dump(
        rollout=rollout,
        files=files_of(layout, payload, rollout),
        sample_count=len(samples),
        missing=missing,
        measuring=Measuring(samples) if trained else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedDump:
    """A dump that is durable, or was until the retention removed it.

    Attributes:
        path: of its file; of its manifest, if it has several files.
        manifest: of the dump.
        removed: whether the retention has removed its files.
    """

    path: Path
    manifest: Manifest
    removed: bool = False


class DumpStore(Protocol):
    """Keeps dumps, so that the daemon need not know where: a local folder now, object storage later.

    Methods block. `publish` is called by one thread at a time, `published` also meanwhile.
    """

    def open(self) -> None:
        """Checks that dumps can be kept, and finishes or removes what an earlier process left unfinished.

        Raises:
            OSError: the place cannot be used.
        """
        ...

    def published(self, key: RolloutKey) -> PublishedDump | None:
        """Returns the complete dump that is, or was, kept of this rollout, of the highest attempt; None without one.

        Raises:
            OSError: it cannot be told.
        """
        ...

    def publish(self, dump: Dump) -> PublishedDump:
        """Makes a dump durable under its final name, and returns it; or the better one that is there already.

        Afterwards, whatever became of it, nothing here uses its tensors: their room is given away.

        Raises:
            OSError: it could not; what was there before is untouched.
        """
        ...
