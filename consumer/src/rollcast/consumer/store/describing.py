"""What is written down of a dump: its manifest, and what makes it better than another one."""

import hashlib
import platform
import time
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from rollcast.consumer.metrics import Metric
from rollcast.consumer.rollout import Rollout
from rollcast.consumer.store.manifest import Manifest, ManifestFile, Worth
from rollcast.consumer.store.protocol import Dump
from rollcast.schemas import SHARD_SLOT


def worth_of(dump: Dump) -> Worth:
    """Returns the worth of a dump that is not written yet."""
    closing_events = sum(shard.event is not None for shard in dump.rollout.shards)
    return Worth(dump.sample_count, closing_events, _own_columns_of(dump))


def _own_columns_of(dump: Dump) -> int:
    # Of a slot that was refused for its content, the records are there and the columns are not.
    refused = {rank for rank, slots in dump.missing.slots if SHARD_SLOT in slots}
    whole = (shard for shard in dump.rollout.shards if any(slot.cut.slot == SHARD_SLOT for slot in shard.slots))
    return sum(shard.data_parallel_rank not in refused for shard in whole)


def manifest_of(dump: Dump, files: tuple[ManifestFile, ...], metrics: tuple[Metric, ...]) -> Manifest:
    """Returns the manifest of a dump whose files were just written, and that was measured."""
    rollout = dump.rollout
    events = [shard.event for shard in rollout.shards if shard.event is not None]
    return Manifest(
        id=rollout.id,
        shards=len(rollout.shards),
        samples=dump.sample_count,
        parts=rollout.part_count,
        own_columns=_own_columns_of(dump),
        duplicates=rollout.duplicates,
        replaced_values=sum(event.replaced_values for event in events),
        raw_bytes=rollout.raw_bytes,
        wire_bytes=rollout.wire_bytes,
        offsets=rollout.spans,
        digests=digests_of(rollout),
        files=files,
        written_at_ms=time.time_ns() // 1_000_000,
        metrics=metrics,
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


@cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("rollcast", "torch"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "unknown"
    return versions
