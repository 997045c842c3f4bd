"""Which manifests stand in a folder, whatever else is there."""

import logging
from dataclasses import replace
from pathlib import Path

from rollcast.consumer.errors import DumpFileError
from rollcast.consumer.store.manifest import Manifest, manifest_path, parse_manifest
from rollcast.consumer.store.protocol import PublishedDump
from rollcast.consumer.store.template import TOMBSTONE_SUFFIX

_log = logging.getLogger("rollcast.consumer")


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
