"""Dumps as files in local folders."""

import errno
import logging
import os
from pathlib import Path
from typing import IO

import torch

from rollcast.consumer.errors import DumpFileError
from rollcast.consumer.rollout import RolloutKey
from rollcast.consumer.store.files import (
    HashingWriter,
    locked,
    make_directory,
    settle,
    sweep,
    sync_directory,
    temporary_beside,
    write_durably,
)
from rollcast.consumer.store.manifest import Manifest, manifest_of, manifest_path, read_manifest
from rollcast.consumer.store.protocol import Dump, PublishedDump
from rollcast.consumer.store.template import PathTemplate

_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}

_log = logging.getLogger("rollcast.consumer")


class LocalDumpStore:
    """Keeps each dump as a file with a sidecar `<name>.manifest.json`.

    A dump gets its name by the rename of a whole, synced file; then its manifest gets its name in the same way. So a
    manifest always follows its dump: a crash in between leaves the older manifest or none, `published` does not
    report the new dump, and the next run writes both again. When a newer attempt replaces a dump, the older one stays
    as `<stem>.attempt-N.pt` with its manifest. An incomplete dump is `<stem>.incomplete.pt` and goes when the
    complete one has come.

    What is there is judged under a lock of the folder, after the new file is whole: a daemon that was paused in a
    write finds what another one has published meanwhile, and leaves it.

    Args:
        template: path with `{run_id}` and `{rollout_id}`.

    Raises:
        TemplateError: dumps could meet under one name.
    """

    def __init__(self, template: str) -> None:
        self._template = PathTemplate(template)

    def open(self) -> None:
        """Makes the folder that does not depend on the run, and removes temporary files of dead writers."""
        fixed = Path(self._template.template.partition("{")[0] + "x").parent
        make_directory(fixed)
        if not os.access(fixed, os.W_OK | os.X_OK):
            raise PermissionError(f"{fixed} is not writable")
        for directory in self._template.directories():
            for path in sweep(directory):
                _log.info("removed %s, left by a writer that died", path)

    def path(self, key: RolloutKey) -> Path:
        """Returns the path of a complete dump."""
        return self._template.path(key)

    def published(self, key: RolloutKey) -> PublishedDump | None:
        """Returns the complete dump of this rollout, if it is there with its manifest."""
        path = self.path(key)
        manifest = _usable_manifest(path)
        return PublishedDump(path=path, manifest=manifest) if manifest is not None and manifest.complete else None

    def publish(self, dump: Dump) -> PublishedDump:
        """Writes the dump and its manifest; the same or a higher attempt that is there already is left as it is."""
        if (better := self._better(dump)) is not None:
            return better
        path = self._path_of(dump)
        make_directory(path.parent)
        with temporary_beside(path) as (temporary, file):
            writer = HashingWriter(file)
            _save(dump, writer)
            settle(file)
            with locked(path.parent):
                if (better := self._better(dump)) is not None:
                    return better
                return self._replace(path, dump, temporary, writer)

    def _path_of(self, dump: Dump) -> Path:
        path = self.path(dump.rollout.id.key)
        return _beside(path, "incomplete") if dump.missing else path

    def _better(self, dump: Dump) -> PublishedDump | None:
        """Returns what is kept and must not be replaced by this dump."""
        rollout = dump.rollout.id
        existing = self.published(rollout.key)
        if existing is not None and existing.manifest.id.attempt >= rollout.attempt:
            return existing
        if not dump.missing:
            return None
        path = self._path_of(dump)
        earlier = _usable_manifest(path)
        if earlier is None or (earlier.id.attempt, earlier.samples) < (rollout.attempt, len(dump.payload["samples"])):
            return None
        return PublishedDump(path=path, manifest=earlier)

    def _replace(self, path: Path, dump: Dump, temporary: Path, writer: HashingWriter) -> PublishedDump:
        """Gives the written dump its name; the caller holds the folder's lock."""
        rollout = dump.rollout.id
        if not dump.missing:
            if (replaced := self.published(rollout.key)) is not None:
                _keep_aside(path, replaced.manifest.id.attempt)
            temporary.replace(path)
            # Before the manifest: a crash in between is repaired by the next run, which does all of it again.
            _remove_obsolete(_beside(path, "incomplete"), rollout.attempt)
        else:
            temporary.replace(path)
        sync_directory(path.parent)
        manifest = manifest_of(dump, sha256=writer.sha256(), file_bytes=writer.size)
        write_durably(manifest_path(path), lambda file: _write_text(file, manifest.to_json()))
        return PublishedDump(path=path, manifest=manifest)


def _usable_manifest(path: Path) -> Manifest | None:
    try:
        return read_manifest(path)
    except DumpFileError as exc:
        _log.warning("%s is ignored: %s", manifest_path(path), exc)
        return None


def _save(dump: Dump, writer: HashingWriter) -> None:
    try:
        torch.save(dump.payload, writer)  # type: ignore[arg-type]  # torch needs only write() and flush()
    except RuntimeError as exc:
        if writer.error is None:
            raise
        raise writer.error from exc


def _write_text(file: IO[bytes], text: str) -> None:
    file.write(text.encode())


def _keep_aside(path: Path, attempt: int) -> None:
    aside = _beside(path, f"attempt-{attempt}")
    for source, target in ((path, aside), (manifest_path(path), manifest_path(aside))):
        try:
            os.link(source, target)
        except FileExistsError:
            # A crash came between this step and the new manifest: what is aside already is the right one.
            continue
        except OSError as exc:
            if exc.errno not in _NO_HARD_LINKS:
                raise
            source.rename(target)


def _remove_obsolete(path: Path, attempt: int) -> None:
    manifest = _usable_manifest(path)
    if manifest is None or manifest.id.attempt <= attempt:
        path.unlink(missing_ok=True)
        manifest_path(path).unlink(missing_ok=True)


def _beside(path: Path, word: str) -> Path:
    return path.with_name(f"{path.stem}.{word}{path.suffix}")
