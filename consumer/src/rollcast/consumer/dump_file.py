"""Reads dump files."""

import hashlib
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from rollcast.consumer.errors import DumpFileError
from rollcast.consumer.store.manifest import Manifest

_ZIP_MAGIC = b"PK\x03\x04"


def load_dump(path: Path) -> dict[str, Any]:
    """Returns the payload of a v2 dump; tensors are mapped from the file, and no code in it is run.

    Raises:
        DumpFileError: there is no readable dump.
    """
    try:
        _check_container(path)
        payload = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except DumpFileError:
        raise
    except OSError as exc:
        raise DumpFileError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    except pickle.UnpicklingError as exc:
        # torch's own text advises to load it without that check, which would run code of the file.
        raise DumpFileError(f"{path} holds objects that a dump may not hold; it was not loaded") from exc
    except Exception as exc:
        raise DumpFileError(f"{path} is not a torch file, or a damaged one; it was not loaded") from exc
    samples = payload.get("samples") if isinstance(payload, dict) else None
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        raise DumpFileError(f"{path} is a torch file, but no v2 dump: it has no list of samples")
    dump: dict[str, Any] = payload
    return dump


def check_against(path: Path, manifest: Manifest) -> None:
    """Returns if the file is the one that its manifest describes, by size and SHA-256.

    Raises:
        DumpFileError: it is another, or cannot be read.
    """
    try:
        size = path.stat().st_size
        if size != manifest.file_bytes:
            raise DumpFileError(
                f"{path} does not match its manifest: it has {size} bytes, not {manifest.file_bytes}; "
                "it was changed or cut after it was written"
            )
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as exc:
        raise DumpFileError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    if digest != manifest.sha256:
        raise DumpFileError(
            f"{path} does not match its manifest: its SHA-256 is {digest}, not {manifest.sha256}; "
            "it was changed after it was written"
        )


def _check_container(path: Path) -> None:
    """Returns if the file is a whole zip archive, which is what torch.save writes."""
    with path.open("rb") as file:
        magic = file.read(len(_ZIP_MAGIC))
        whole = zipfile.is_zipfile(file)
    if magic != _ZIP_MAGIC:
        raise DumpFileError(f"{path} is not a torch file")
    if not whole:
        raise DumpFileError(f"{path} is cut short: the end of the archive is missing")
