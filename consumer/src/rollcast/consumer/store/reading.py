"""Which manifests stand in a folder, whatever else is there."""

import logging
import os
import stat
from dataclasses import replace
from pathlib import Path

from rollcast.consumer.errors import DumpFileError
from rollcast.consumer.store.manifest import Manifest, manifest_path
from rollcast.consumer.store.protocol import PublishedDump
from rollcast.consumer.template import TOMBSTONE_SUFFIX

_MAX_BYTES = 64 * 1024 * 1024

_log = logging.getLogger("rollcast.consumer")


def parse_manifest(path: Path) -> Manifest | None:
    """Returns the manifest in this file, whether or not its dump is there; None without the file.

    Raises:
        DumpFileError: there is one, but it cannot be understood.
    """
    try:
        # What opens without a wait may still be a folder or a pipe.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise DumpFileError("not a manifest: it is no file")
            text = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except IsADirectoryError as exc:
        raise DumpFileError("not a manifest: it is a folder") from exc
    if len(text) > _MAX_BYTES:
        raise DumpFileError(f"not a manifest: it has more than {_MAX_BYTES} bytes")
    return Manifest.from_json(text)


def tombstone_path(base: Path) -> Path:
    """Returns where the manifest stands after the retention has removed its dump."""
    return base.with_name(base.name + TOMBSTONE_SUFFIX)


def usable(path: Path) -> Manifest | None:
    """Returns the manifest in this file; None without one that can be understood."""
    try:
        return parse_manifest(path)
    except DumpFileError as exc:
        _log.warning("%s is ignored: %s", path, exc)
        return None


def kept_at(base: Path) -> PublishedDump | None:
    """Returns the dump, complete or not, whose manifest and files are there; or that was removed on purpose."""
    manifest = usable(manifest_path(base))
    if manifest is not None and all(base.with_name(file.name).is_file() for file in manifest.files):
        return published_as(base, manifest)
    removed = usable(tombstone_path(base))
    return replace(published_as(base, removed), removed=True) if removed is not None else None


def published_as(base: Path, manifest: Manifest) -> PublishedDump:
    """Returns the dump with this manifest."""
    path = base.with_name(manifest.files[0].name) if len(manifest.files) == 1 else manifest_path(base)
    return PublishedDump(path=path, manifest=manifest)
