"""Reads dump files."""

import pickle
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rollcast.consumer.container import check_beginning
from rollcast.consumer.errors import DumpFileError, NoDumpError, ShutFileError
from rollcast.consumer.store.files import file_sha256
from rollcast.consumer.store.manifest import Manifest, ManifestFile, manifest_path
from rollcast.consumer.store.reading import parse_manifest, usable
from rollcast.consumer.template import MANIFEST_SUFFIX

_READ_BYTES = 1024**2


def load_dump(path: Path) -> dict[str, Any]:
    """Returns what a file of a dump holds, whatever its layout; tensors are mapped, and no code in it is run.

    Raises:
        DumpFileError: there is no readable file of a dump; a `NoDumpError` where there is one of something else.
    """
    # First: what looks for the end of an archive reads a file without an end, such as a device, for ever.
    check_beginning(path)
    try:
        if not zipfile.is_zipfile(path):
            raise DumpFileError(f"{path} is cut short: the end of the archive is missing")
        payload = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except DumpFileError:
        raise
    except OSError as exc:
        raise DumpFileError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    except pickle.UnpicklingError as exc:
        # torch's own text advises to load it without that check, which would run code of the file.
        _check_objects(path)
        raise NoDumpError(f"{path} holds objects that a dump may not hold; it was not loaded") from exc
    except Exception as exc:
        raise DumpFileError(f"{path} is not a torch file, or a damaged one; it was not loaded") from exc
    if not isinstance(payload, dict) or not (_is_v2(payload) or _is_shard(payload)):
        _check_objects(path)
        raise NoDumpError(f"{path} is a torch file, but no dump: it has neither samples nor rollout_data")
    return payload


def _check_objects(path: Path) -> None:
    """Returns if what the file holds, tensors aside, is what was written; torch does not compare the checksum."""
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith("/data.pkl"):
                    with archive.open(name) as objects:
                        while objects.read(_READ_BYTES):
                            pass
    except OSError as exc:
        raise DumpFileError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    except Exception as exc:
        raise DumpFileError(f"{path} is damaged: its objects do not have their checksum; it was not loaded") from exc


def samples_of(payload: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the samples in a file of a dump, as `load_dump` has returned it."""
    if _is_v2(payload):
        samples: list[dict[str, Any]] = payload["samples"]
        return samples
    data = payload["rollout_data"]
    count = len(data["response_lengths"])
    columns = {name: values for name, values in data.items() if isinstance(values, list) and len(values) == count}
    return [{name: values[index] for name, values in columns.items()} for index in range(count)]


def _is_v2(payload: Mapping[str, Any]) -> bool:
    samples = payload.get("samples")
    return isinstance(samples, list) and all(isinstance(sample, dict) for sample in samples)


def _is_shard(payload: Mapping[str, Any]) -> bool:
    data = payload.get("rollout_data")
    return isinstance(data, dict) and isinstance(data.get("response_lengths"), list)


def described_in(path: Path) -> tuple[Manifest, ManifestFile] | None:
    """Returns the manifest that describes this file of a dump, and its line in it; None without one.

    Raises:
        DumpFileError: a manifest stands beside it, but cannot be understood.
    """
    own = parse_manifest(manifest_path(path))
    others = path.parent.glob(f"*{MANIFEST_SUFFIX}") if own is None else ()
    for manifest in filter(None, (own, *map(usable, others))):
        for file in manifest.files:
            if file.name == path.name:
                return manifest, file
    return None


def check_against(path: Path, file: ManifestFile) -> None:
    """Returns if the file is the one that its manifest describes, by size and SHA-256.

    Raises:
        DumpFileError: it is another, or cannot be read; a `ShutFileError` where this user may not read it.
    """
    try:
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            raise DumpFileError(f"{path} is a folder where a dump should be; move it away")
        size = found.st_size
        if size != file.size:
            raise DumpFileError(
                f"{path} does not match its manifest: it has {size} bytes, not {file.size}; "
                "it was changed or cut after it was written"
            )
        digest = file_sha256(path)
    except PermissionError as exc:
        raise ShutFileError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    except OSError as exc:
        raise DumpFileError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    if digest != file.sha256:
        raise DumpFileError(
            f"{path} does not match its manifest: its SHA-256 is {digest}, not {file.sha256}; "
            "it was changed after it was written"
        )
