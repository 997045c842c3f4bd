"""The sidecar of a dump: where it came from, what is in it, and how to prove it."""

import hashlib
import json
import platform
import time
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rollcast.consumer.errors import DumpFileError
from rollcast.consumer.metrics import Metric
from rollcast.consumer.rollout import Missing, OffsetSpan, Rollout, RolloutId
from rollcast.consumer.store.protocol import Dump
from rollcast.consumer.store.template import MANIFEST_SUFFIX

FORMAT = "rollcast.manifest/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestFile:
    """One file of a dump.

    Attributes:
        name: in the folder of the manifest.
        rank: of the writer.
        sha256: of the file, hex.
        size: of the file in bytes.
    """

    name: str
    rank: int
    sha256: str
    size: int

    def __post_init__(self) -> None:
        """Refuses a name that leads out of the folder."""
        if self.name != Path(self.name).name or self.name in ("", ".."):
            raise ValueError(f"{self.name!r} is no file name")


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What is known of a dump without loading it.

    Attributes:
        id: the rollout.
        shards: data-parallel shards in the dump.
        samples: samples in the dump.
        parts: records that its samples and shards came in, without closing events.
        duplicates: records that came again before it was complete, and were dropped.
        replaced_values: values that the contract cannot carry, replaced by a marker.
        raw_bytes: tensor bytes before compression.
        wire_bytes: bytes of the records.
        offsets: where the records are.
        digests: SHA-256 of what each shard's closing event says of its content, by data-parallel rank.
        files: of the dump.
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
    digests: tuple[tuple[int, str], ...]
    files: tuple[ManifestFile, ...]
    written_at_ms: int
    metrics: tuple[Metric, ...]
    missing: Missing
    gaps: tuple[OffsetSpan, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return not self.missing

    @property
    def file_bytes(self) -> int:
        """Size of all files."""
        return sum(file.size for file in self.files)

    @property
    def sha256(self) -> str:
        """Digest of the file, hex; of several files, that of their `sha256sum` lines in the order of the manifest."""
        if len(self.files) == 1:
            return self.files[0].sha256
        lines = "".join(f"{file.sha256}  {file.name}\n" for file in self.files)
        return hashlib.sha256(lines.encode()).hexdigest()

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
            "files": [asdict(file) for file in self.files],
            "offsets": {str(span.partition): [span.first, span.last] for span in self.offsets},
            "digests": {str(rank): digest for rank, digest in self.digests},
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
    def from_json(cls, text: str | bytes) -> "Manifest":
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
                files=tuple(ManifestFile(**file) for file in content["files"]),
                offsets=tuple(OffsetSpan(int(at), *span) for at, span in content["offsets"].items()),
                digests=tuple((int(rank), str(digest)) for rank, digest in content["digests"].items()),
                metrics=tuple(Metric(name=name, **values) for name, values in content["metrics"].items()),
                missing=_missing(content.get("missing")),
                gaps=tuple(OffsetSpan(*gap) for gap in content.get("gaps", ())),
                versions=dict(content["versions"]),
                **{name: int(content[name]) for name in _PLAIN},
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as exc:
            raise DumpFileError(f"not a manifest: {exc!r}") from exc


_PLAIN = (
    "shards",
    "samples",
    "parts",
    "duplicates",
    "replaced_values",
    "raw_bytes",
    "wire_bytes",
    "written_at_ms",
)


def manifest_of(dump: Dump, files: tuple[ManifestFile, ...]) -> Manifest:
    """Returns the manifest of a dump whose files were just written."""
    rollout = dump.rollout
    events = [shard.event for shard in rollout.shards if shard.event is not None]
    return Manifest(
        id=rollout.id,
        shards=len(rollout.shards),
        samples=dump.sample_count,
        parts=rollout.part_count,
        duplicates=rollout.duplicates,
        replaced_values=sum(event.replaced_values for event in events),
        raw_bytes=rollout.raw_bytes,
        wire_bytes=rollout.wire_bytes,
        offsets=rollout.spans,
        digests=digests_of(rollout),
        files=files,
        written_at_ms=time.time_ns() // 1_000_000,
        metrics=dump.metrics,
        missing=dump.missing,
        gaps=dump.gaps,
        versions=_versions(),
    )


def digests_of(rollout: Rollout) -> tuple[tuple[int, str], ...]:
    """Returns a digest of what each closing event says of its shard's content, by data-parallel rank."""
    events = [shard.event for shard in rollout.shards if shard.event is not None]
    return tuple(
        (event.data_parallel_rank, hashlib.sha256(b"".join(event.slot_digests)).hexdigest()) for event in events
    )


def manifest_path(base: Path) -> Path:
    """Returns where the manifest stands: beside its dump, whose one file has the name `base`."""
    return base.with_name(base.name + MANIFEST_SUFFIX)


def read_manifest(base: Path) -> Manifest | None:
    """Returns the manifest of a dump; None if it or one of its files is not there.

    Raises:
        DumpFileError: there is one, but it cannot be understood.
    """
    manifest = parse_manifest(manifest_path(base))
    present = manifest is not None and all(base.with_name(file.name).is_file() for file in manifest.files)
    return manifest if present else None


def parse_manifest(path: Path) -> Manifest | None:
    """Returns the manifest in this file, whether or not its dump is there; None without the file.

    Raises:
        DumpFileError: there is one, but it cannot be understood.
    """
    try:
        return Manifest.from_json(path.read_bytes())
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
