"""The sidecar of a dump: where it came from, what is in it, and how to prove it."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rollcast.consumer.brief import brief
from rollcast.consumer.errors import DumpFileError
from rollcast.consumer.metrics import Metric
from rollcast.consumer.rollout import Missing, OffsetSpan, RolloutId
from rollcast.consumer.store import fields
from rollcast.consumer.streams import is_known
from rollcast.consumer.template import MANIFEST_SUFFIX
from rollcast.schemas import SHARD_SLOT, ContractError
from rollcast.schemas.topics import check_run_id

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What is known of a dump without loading it.

    Attributes:
        id: the rollout.
        shards: data-parallel shards in the dump.
        samples: samples in the dump.
        parts: records that its samples and shards came in, without closing events.
        own_columns: shards whose own columns, beside those of their samples, are in the dump.
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
    own_columns: int
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
    def worth(self) -> "Worth":
        """What makes one incomplete dump of an attempt better than another."""
        return Worth(self.samples, len(self.digests), self.own_columns)

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
            "own_columns": self.own_columns,
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
        """Inverse of `to_json`; every field is checked, whoever wrote it.

        Raises:
            DumpFileError: it is not a manifest of a known format.
        """
        try:
            content = fields.mapping(json.loads(text))
            if content["format"] != FORMAT:
                raise DumpFileError(f"the manifest has the format {brief(content['format'])!r}, not {FORMAT!r}")
            return cls(
                id=_identity(content),
                files=_files(content["files"]),
                offsets=tuple(_span(fields.number_as_key(at), *span) for at, span in _items(content["offsets"])),
                digests=tuple(
                    (fields.number_as_key(rank), fields.sha256(digest)) for rank, digest in _items(content["digests"])
                ),
                metrics=tuple(_metric(name, fields.mapping(values)) for name, values in _items(content["metrics"])),
                missing=_missing(content.get("missing")),
                # Older manifests do not tell.
                own_columns=fields.number(content.get("own_columns", 0), highest=fields.MAX_INT),
                gaps=tuple(_span(*gap) for gap in fields.sequence(content.get("gaps", []))),
                versions={name: fields.text(told) for name, told in _items(content["versions"])},
                **{name: fields.number(content[name], highest=highest) for name, highest in _PLAIN.items()},
            )
        except (ContractError, ValueError, KeyError, TypeError, RecursionError) as exc:
            raise DumpFileError(f"not a manifest: {brief(repr(exc))}") from exc


_PLAIN = {
    "shards": fields.MAX_INT,
    "samples": fields.MAX_INT,
    "parts": fields.MAX_INT,
    "duplicates": fields.MAX_LONG,
    "replaced_values": fields.MAX_LONG,
    # A sum of what the closing events claim.
    "raw_bytes": fields.MAX_LONG * fields.MAX_INT,
    "wire_bytes": fields.MAX_LONG,
    "written_at_ms": fields.MAX_LONG,
}
_METRIC_COUNTS = ("rollout_count", "token_count", "non_finite_count", "missing_count")


class Worth(NamedTuple):
    """How much of a rollout an incomplete dump has; what comes first decides.

    Attributes:
        samples: whole samples.
        closing_events: shards that told all of their layout.
        own_columns: shards whose own columns are there.
    """

    samples: int
    closing_events: int
    own_columns: int


def manifest_path(base: Path) -> Path:
    """Returns where the manifest stands: beside its dump, whose one file has the name `base`."""
    return base.with_name(base.name + MANIFEST_SUFFIX)


def _identity(content: dict[str, Any]) -> RolloutId:
    stream = fields.text(content["stream"])
    if not is_known(stream):
        raise ValueError(f"the stream {brief(stream)!r} is unknown")
    return RolloutId(
        check_run_id(fields.text(content["run_id"])),
        fields.number(content["attempt"], lowest=-fields.MAX_LONG - 1),
        fields.number(content["rollout_id"]),
        stream,
    )


def _files(content: object) -> tuple[ManifestFile, ...]:
    files = tuple(
        ManifestFile(
            name=fields.file_name(file["name"]),
            rank=fields.number(file["rank"], lowest=-fields.MAX_INT - 1, highest=fields.MAX_INT),
            sha256=fields.sha256(file["sha256"]),
            size=fields.number(file["size"]),
        )
        for file in map(fields.mapping, fields.sequence(content))
    )
    fields.number(sum(file.size for file in files))
    if not files or len({file.name for file in files}) < len(files):
        raise ValueError("it has no file, or one twice")
    return files


def _metric(name: str, content: dict[str, Any]) -> Metric:
    failure = content.get("failure")
    return Metric(
        name=fields.text(name),
        per_rollout_mean=fields.mean(content["per_rollout_mean"]),
        per_token_mean=fields.mean(content["per_token_mean"]),
        failure=None if failure is None else fields.text(failure),
        **{each: fields.number(content[each]) for each in _METRIC_COUNTS},
    )


def _span(partition: object, first: object, last: object) -> OffsetSpan:
    start = fields.number(first)
    return OffsetSpan(fields.number(partition), start, fields.number(last, lowest=start))


def _missing(content: object) -> Missing:
    if content is None:
        return Missing()
    told = fields.mapping(content)
    return Missing(
        shards=tuple(map(fields.number, fields.sequence(told["shards"]))),
        shard_count_known=bool(told["shard_count_known"]),
        slots=tuple((fields.number_as_key(rank), _slots(slots)) for rank, slots in _items(told["slots"])),
    )


def _slots(content: object) -> tuple[int, ...]:
    return tuple(fields.number(slot, lowest=SHARD_SLOT) for slot in fields.sequence(content))


def _items(content: object) -> Iterable[tuple[str, Any]]:
    return fields.mapping(content).items()
