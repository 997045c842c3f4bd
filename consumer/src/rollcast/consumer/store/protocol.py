"""The seam between the daemon and the place where dumps are kept."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rollcast.consumer.metrics import Metric
from rollcast.consumer.rollout import Missing, OffsetSpan, Rollout, RolloutKey

if TYPE_CHECKING:
    from rollcast.consumer.store.manifest import Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Dump:
    """A restored rollout, ready to be kept.

    Attributes:
        rollout: where it came from.
        payload: what is kept.
        missing: what it lacks; empty for a complete dump.
        metrics: its metrics.
        gaps: offsets of its partitions that could not be read, where something is missing.
    """

    rollout: Rollout
    payload: dict[str, Any]
    missing: Missing
    metrics: tuple[Metric, ...]
    gaps: tuple[OffsetSpan, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedDump:
    """A dump that is durable.

    Attributes:
        path: of the file.
        manifest: of the dump.
    """

    path: Path
    manifest: "Manifest"


class DumpStore(Protocol):
    """Keeps dumps, so that the daemon need not know where: a local folder now, object storage later.

    Methods block. `publish` is called by one thread at a time, `published` also meanwhile.
    """

    def open(self) -> None:
        """Checks that dumps can be kept, and removes what an earlier process left unfinished.

        Raises:
            OSError: the place cannot be used.
        """
        ...

    def published(self, key: RolloutKey) -> PublishedDump | None:
        """Returns the complete dump that is kept of this rollout, if any.

        Raises:
            OSError: it cannot be told.
        """
        ...

    def publish(self, dump: Dump) -> PublishedDump:
        """Makes a dump durable under its final name, and returns it; or the better one that is there already.

        Raises:
            OSError: it could not; what was there before is untouched.
        """
        ...
