"""The tensor file of a bundle: safetensors layout, size and offsets known before the first byte is there."""

import errno
import json
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from rollcast.producer.errors import SpoolError, SpoolFullError
from rollcast.producer.plan import PlannedTensor
from rollcast.producer.spool.read import HEAD_LENGTH_BYTES

_ALIGNMENT = 64
_SAFETENSORS_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


def header_for(tensors: Sequence[PlannedTensor]) -> bytes:
    """Returns the file's head, length field included; dtypes that the format lacks are listed as bytes."""
    entries = {}
    for tensor in tensors:
        name = _SAFETENSORS_NAMES.get(tensor.announced.dtype)
        entries[tensor.name] = {
            "dtype": name or "U8",
            "shape": list(tensor.announced.shape) if name else [tensor.announced.total_bytes],
            "data_offsets": [tensor.offset, tensor.offset + tensor.announced.total_bytes],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(HEAD_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(HEAD_LENGTH_BYTES, "little") + text


class TensorFile:
    """A tensor file that is being filled; every peer opens it, whoever comes first creates it.

    Attributes:
        data: the bytes behind the head, as a uint8 tensor over the mapping.

    Raises:
        SpoolFullError: the disk has no room; nothing is left behind by a later write.
        SpoolError: the file cannot be created.
    """

    def __init__(self, path: Path, header: bytes, data_bytes: int) -> None:
        size = len(header) + data_bytes
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                # Without a reservation a full disk would show as SIGBUS in the middle of a copy.
                os.posix_fallocate(descriptor, 0, size)
                self._map = mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)
        except OSError as exc:
            if exc.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
                raise SpoolFullError(f"no room for {size} bytes at {path}; free space or choose another spool") from exc
            raise SpoolError(f"{path} cannot be created: {exc.strerror}") from exc
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)[len(header) :]
        self._header = header

    def write_header(self) -> None:
        """Writes the head; one of the peers does it."""
        self._map[: len(self._header)] = self._header

    def close(self) -> None:
        """Gives up the mapping; the file keeps what was written."""
        del self.data
        self._map.close()
