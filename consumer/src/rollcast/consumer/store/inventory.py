"""What is kept of a run, known without reading every manifest again."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from rollcast.consumer.retention import Kept
from rollcast.consumer.store.reading import usable
from rollcast.consumer.template import MANIFEST_SUFFIX, PathTemplate
from rollcast.schemas import TRAIN_STREAM

_log = logging.getLogger("rollcast.consumer")

_Signature = tuple[int, int, int]
"""Inode, size and time of change: a manifest is replaced by a new file, and never written to."""


@dataclass(frozen=True, slots=True)
class _Known:
    signature: _Signature
    run_id: str = ""
    kept: Kept | None = None


class Inventory:
    """Reads a manifest once, and again when another file has its name.

    Args:
        template: names the dumps.
    """

    def __init__(self, template: PathTemplate) -> None:
        self._template = template
        self._known: dict[Path, dict[str, _Known]] = {}

    def of_run(self, run_id: str) -> dict[int, Kept]:
        """Returns what is kept of each rollout's complete train dumps, by rollout.

        Raises:
            OSError: a folder cannot be listed.
        """
        kept: dict[int, Kept] = {}
        for directory in self._template.directories(run_id):
            for known in self._listed(directory).values():
                if known.kept is None or known.run_id != run_id:
                    continue
                one = known.kept
                other = kept.get(one.rollout_id, Kept(one.rollout_id, one.attempt, 0))
                kept[one.rollout_id] = Kept(one.rollout_id, max(one.attempt, other.attempt), one.size + other.size)
        return kept

    def _listed(self, directory: Path) -> dict[str, _Known]:
        before, now = self._known.get(directory, {}), {}
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.endswith(MANIFEST_SUFFIX):
                    try:
                        found = entry.stat()
                    except FileNotFoundError:
                        continue
                    signature = (found.st_ino, found.st_size, found.st_mtime_ns)
                    known = before.get(entry.name)
                    same = known is not None and known.signature == signature
                    now[entry.name] = known if known is not None and same else _read(Path(entry.path), signature)
        self._known[directory] = now
        return now


def _read(path: Path, signature: _Signature) -> _Known:
    try:
        manifest = usable(path)
    except OSError as exc:
        _log.warning("%s is ignored: %s", path, exc)
        manifest = None
    if manifest is None or not manifest.complete or manifest.id.stream != TRAIN_STREAM:
        return _Known(signature)
    kept = Kept(manifest.id.rollout_id, manifest.id.attempt, manifest.file_bytes)
    return _Known(signature, manifest.id.run_id, kept)
