"""What the publishers of a spool say of themselves, for the shipper to export."""

import json
import math
import os
import stat
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollcast.producer.errors import SpoolError

_PATTERN = ".stats-*.json"
_MAX_FILE_BYTES = 64 * 1024
_MAX_WRITERS = 64
_MAX_REASONS = 16
_MAX_LABEL_CHARS = 120
_OTHER = "other"


@dataclass(frozen=True, kw_only=True, slots=True)
class WriterStats:
    """Counters of one writer rank since its trainer started.

    Attributes:
        run_id: name of the run, cut to a length that suits a label.
        rank: of the writer.
        published: rollouts that are whole in the spool.
        bytes: raw size of what was published.
        stall_seconds: time that training has spent in `publish`.
        reasons: rollouts dropped, by reason; rare reasons of many are added up as `other`.
    """

    run_id: str
    rank: int
    published: int
    bytes: int
    stall_seconds: float
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def dropped(self) -> int:
        """Rollouts dropped, for any reason."""
        return sum(self.reasons.values())


def read_publisher_stats(spool: Path) -> list[WriterStats]:
    """Returns what the writers of a spool have noted last, at most 64 of them; what is no such file is passed over."""
    files = []
    for path in _matches(spool):
        try:
            status = path.lstat()
        except OSError:  # it may be replaced or removed at any time
            continue
        if stat.S_ISREG(status.st_mode):
            files.append((status.st_mtime_ns, path))
    found = []
    for _, path in sorted(files, reverse=True)[:_MAX_WRITERS]:
        try:
            found.append(parse_publisher_stats(_content(path)))
        except (OSError, SpoolError):
            continue
    # Two files of one writer would make one series twice, which Prometheus refuses; the newer one counts.
    return list({(stats.run_id, stats.rank): stats for stats in reversed(found)}.values())


def _matches(spool: Path) -> list[Path]:
    try:
        return list(spool.glob(_PATTERN))
    except OSError:
        return []


def _content(path: Path) -> bytes:
    # Should it have become a pipe by now, opening must not wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.read(descriptor, _MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)


def utf8(text: str) -> str:
    """Returns a text without what UTF-8 cannot express, which would break the whole answer to Prometheus."""
    return text.encode(errors="replace").decode()


def parse_publisher_stats(content: bytes) -> WriterStats:
    """Returns the counters in a file's content.

    Raises:
        SpoolError: it is none of these files, or too long.
    """
    if len(content) > _MAX_FILE_BYTES:
        raise SpoolError(f"a file of counters is longer than {_MAX_FILE_BYTES} bytes")
    try:
        data = json.loads(content)
        reasons = Counter[str]()
        for reason, count in data["dropped"].items():
            reasons[utf8(reason[:_MAX_LABEL_CHARS])] += _count(count)
        kept = dict(reasons.most_common(_MAX_REASONS))
        if rest := reasons.total() - sum(kept.values()):
            kept[_OTHER] = kept.get(_OTHER, 0) + rest
        return WriterStats(
            run_id=utf8(str(data["run_id"])[:_MAX_LABEL_CHARS]),
            rank=_count(data["rank"]),
            published=_count(data["published"]),
            bytes=_count(data["bytes"]),
            stall_seconds=_seconds(data["stall_seconds"]),
            reasons=kept,
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise SpoolError(f"a file of counters makes no sense: {exc!r}") from exc


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is no count")
    return value


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} is no time")
    return float(value)
