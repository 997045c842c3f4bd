"""Waits for the dumps that came through Kafka and compares each with the one that the inline path wrote."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from rollcast.consumer import differences
from rollcast.consumer.store.manifest import Manifest, manifest_path
from rollcast.consumer.store.reading import parse_manifest
from rollcast_demo.daemon import Daemon

_LOOK_EVERY_S = 0.2
_SHOWN_DIFFERENCES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class DumpPair:
    """The two dumps of one rollout.

    Attributes:
        run_id: The run.
        rollout_id: The rollout.
        through_kafka: Where the daemon writes the dump.
        inline: Where the trainers wrote it themselves.
    """

    run_id: str
    rollout_id: int
    through_kafka: Path
    inline: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """How a rollout came through.

    Attributes:
        pair: The two dumps.
        manifest: What the daemon says of its dump; None where there is no complete one.
        differences: The first differences, in words; none means that both dumps are bit-equal.
    """

    pair: DumpPair
    manifest: Manifest | None
    differences: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Whether the dump is there and equal."""
        return self.manifest is not None and not self.differences


def await_dumps(pairs: list[DumpPair], daemon: Daemon, *, timeout_s: float, on_count: Callable[[int], None]) -> None:
    """Return when every dump that the daemon owes is complete, or when the time is up.

    Args:
        pairs: The dumps to wait for.
        daemon: Who writes them; its end ends the waiting.
        timeout_s: Longest wait.
        on_count: Called with the number of complete dumps so far.

    Raises:
        ProcessFailedError: The daemon is gone.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        daemon.check()
        count = sum(_complete_manifest(pair) is not None for pair in pairs)
        on_count(count)
        if count == len(pairs) or time.monotonic() > deadline:
            return
        # Looking from outside, as any user of the files would.
        time.sleep(_LOOK_EVERY_S)


def compare(pair: DumpPair) -> Verdict:
    """Return the verdict on one rollout."""
    manifest = _complete_manifest(pair)
    if manifest is None:
        return Verdict(pair=pair, manifest=None, differences=())
    through_kafka, inline = (
        torch.load(path, map_location="cpu", weights_only=True) for path in (pair.through_kafka, pair.inline)
    )
    found = differences(through_kafka, inline, limit=_SHOWN_DIFFERENCES)
    return Verdict(pair=pair, manifest=manifest, differences=tuple(map(str, found)))


def _complete_manifest(pair: DumpPair) -> Manifest | None:
    manifest = parse_manifest(manifest_path(pair.through_kafka))
    return manifest if manifest is not None and manifest.complete else None
