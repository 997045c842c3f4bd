"""Folders that all ranks of a benchmark share."""

import os
from pathlib import Path

import torch.distributed as dist


def tmpfs() -> str | None:
    """Returns a folder in memory, as the README recommends for the spool; None where there is none."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108  # only its children are written


def shared(own: Path) -> Path:
    """Returns rank 0's folder on every rank."""
    holder = [str(own)]
    dist.broadcast_object_list(holder, src=0)
    return Path(holder[0])
