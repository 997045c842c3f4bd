"""Reads dump files."""

import pickle
from pathlib import Path
from typing import Any

import torch

from rollcast.consumer.errors import DumpFileError


def load_dump(path: Path) -> dict[str, Any]:
    """Returns the payload of a v2 dump; tensors are mapped from the file, and no code in it is run.

    Raises:
        DumpFileError: there is no readable dump.
    """
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as exc:
        reason = str(exc).partition("\n")[0]
        raise DumpFileError(f"{path} cannot be read as a dump: {reason}") from exc
    if not isinstance(payload, dict) or not isinstance(payload.get("samples"), list):
        raise DumpFileError(f"{path} is a torch file, but no v2 dump: it has no list of samples")
    return payload
