"""The sidecar of a dump: where it came from, what is in it, and how to prove it."""

import json
import platform
import time
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rollcast.consumer.errors import DumpFileError
from rollcast.consumer.metrics import Metric
from rollcast.consumer.rollout import Missing, OffsetSpan, RolloutId
from rollcast.consumer.store.protocol import Dump

FORMAT = "rollcast.manifest/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What is known of a dump without loading it.

    Attributes:
        id: the rollout.
        shards: data-parallel shards in the dump.
        samples: samples in the dump.
        parts: records that its samples and shards came in, without closing events.
        duplicates: records that came again before it was complete.
        replaced_values: values that the contract cannot carry, replaced by a marker.
        raw_bytes: tensor bytes before compression.
        wire_bytes: bytes of the records.
        offsets: where the records are.
        sha256: of the dump file, hex.
        file_bytes: size of the dump file.
        written_at_ms: Unix time.
        metrics: of the rollout.
        missing: what an incomplete dump lacks; empty for a complete one.
        gaps: offsets of its partitions that an incomplete dump's daemon could not read; they may be why.
        versions: of the programs that made it.
    """

    id: RolloutId
    shards: int
    samples: int
    parts: int
    duplicates: int
    replaced_values: int
    raw_bytes: int
    wire_bytes: int
    offsets: tuple[OffsetSpan, ...]
    sha256: str
    file_bytes: int
    written_at_ms: int
    metrics: tuple[Metric, ...]
    missing: Missing
    gaps: tuple[OffsetSpan, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return not self.missing

    def to_json(self) -> str:
        """Returns strict JSON."""
        content: dict[str, Any] = {
            "format": FORMAT,
            "run_id": self.id.run_id,
            "attempt": self.id.attempt,
            "stream": self.id.stream,
            "rollout_id": self.id.rollout_id,
            "complete": self.complete,
            **{name: getattr(self, name) for name in _PLAIN},
            "offsets": {str(span.partition): [span.first, span.last] for span in self.offsets},
            "metrics": {metric.name: metric.as_json() for metric in self.metrics},
            "versions": self.versions,
        }
        if not self.complete:
            content["missing"] = {
                "shards": self.missing.shards,
                "shard_count_known": self.missing.shard_count_known,
                "slots": {str(rank): slots for rank, slots in self.missing.slots},
            }
        if self.gaps:
            content["gaps"] = [[gap.partition, gap.first, gap.last] for gap in self.gaps]
        return json.dumps(content, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Inverse of `to_json`.

        Raises:
            DumpFileError: it is not a manifest of a known format.
        """
        try:
            content = json.loads(text)
            if content["format"] != FORMAT:
                raise DumpFileError(f"the manifest has the format {content['format']!r}, not {FORMAT!r}")
            return cls(
                id=RolloutId(
                    str(content["run_id"]),
                    int(content["attempt"]),
                    int(content["rollout_id"]),
                    str(content["stream"]),
                ),
                offsets=tuple(OffsetSpan(int(at), *span) for at, span in content["offsets"].items()),
                metrics=tuple(Metric(name=name, **values) for name, values in content["metrics"].items()),
                missing=_missing(content.get("missing")),
                gaps=tuple(OffsetSpan(*gap) for gap in content.get("gaps", ())),
                versions=dict(content["versions"]),
                **{name: content[name] for name in _PLAIN},
            )
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise DumpFileError(f"not a manifest: {exc!r}") from exc


_PLAIN = (
    "shards",
    "samples",
    "parts",
    "duplicates",
    "replaced_values",
    "raw_bytes",
    "wire_bytes",
    "sha256",
    "file_bytes",
    "written_at_ms",
)


def manifest_of(dump: Dump, *, sha256: str, file_bytes: int) -> Manifest:
    """Returns the manifest of a dump whose file, just written, has this digest and size."""
    rollout = dump.rollout
    return Manifest(
        id=rollout.id,
        shards=len(rollout.shards),
        samples=len(dump.payload["samples"]),
        parts=rollout.part_count,
        duplicates=rollout.duplicates,
        replaced_values=sum(shard.event.replaced_values for shard in rollout.shards if shard.event is not None),
        raw_bytes=rollout.raw_bytes,
        wire_bytes=rollout.wire_bytes,
        offsets=rollout.spans,
        sha256=sha256,
        file_bytes=file_bytes,
        written_at_ms=time.time_ns() // 1_000_000,
        metrics=dump.metrics,
        missing=dump.missing,
        gaps=dump.gaps,
        versions=_versions(),
    )


def manifest_path(dump_path: Path) -> Path:
    """Returns where the manifest of a dump stands."""
    return dump_path.with_name(f"{dump_path.name}.manifest.json")


def read_manifest(dump_path: Path) -> Manifest | None:
    """Returns the manifest of a dump; None if the dump or its manifest is not there.

    Raises:
        DumpFileError: there is one, but it cannot be understood.
    """
    try:
        dump_path.stat()
        return Manifest.from_json(manifest_path(dump_path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _missing(content: Any) -> Missing:
    if content is None:
        return Missing()
    return Missing(
        shards=tuple(content["shards"]),
        shard_count_known=bool(content["shard_count_known"]),
        slots=tuple((int(rank), tuple(slots)) for rank, slots in content["slots"].items()),
    )


@cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("rollcast", "torch"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "unknown"
    return versions
