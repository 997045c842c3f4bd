"""The tensor file of a bundle: safetensors layout, size and offsets known before the first byte is there."""

import contextlib
import ctypes
import errno
import json
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import torch

from rollcast.producer.errors import SpoolError, SpoolFullError
from rollcast.producer.plan import PlannedTensor
from rollcast.producer.spool.pool import TensorPool
from rollcast.producer.spool.read import HEAD_LENGTH_BYTES

_ALIGNMENT = 64
_KEPT_MAPPINGS = 8
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None)
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
    """A tensor file that is being filled.

    Attributes:
        data: the bytes behind the head, as a uint8 tensor over the mapping.
    """

    def __init__(self, mapping: mmap.mmap, header: bytes, data_bytes: int) -> None:
        self._map, self._header = mapping, header
        self.data = torch.frombuffer(mapping, dtype=torch.uint8)[len(header) : len(header) + data_bytes]

    def write_header(self) -> None:
        """Writes the head; one of the peers does it."""
        self._map[: len(self._header)] = self._header

    def close(self) -> None:
        """Gives the file up; it keeps what was written."""
        del self.data


class TensorFiles:
    """Opens tensor files in one process, and keeps their mappings for the next time.

    A file comes back from the pool with its pages in memory; with its mapping kept, filling it again costs no page
    fault, and a fault costs more than the copy of the page.

    Args:
        pool: of the spool.
    """

    def __init__(self, pool: TensorPool) -> None:
        self._pool = pool
        self._mappings: OrderedDict[tuple[int, int], mmap.mmap] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, path: Path, header: bytes, data_bytes: int) -> TensorFile:
        """Opens a file to be filled; of all peers that open it, the first creates it.

        Raises:
            SpoolFullError: the disk has no room.
            SpoolError: the file cannot be created.
        """
        size = len(header) + data_bytes
        try:
            self._pool.take(path, size)
            return TensorFile(self._mapping_of(path, size), header, data_bytes)
        except OSError as exc:
            if exc.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
                raise SpoolFullError(f"no room for {size} bytes at {path}; free space or choose another spool") from exc
            raise SpoolError(f"{path} cannot be created: {exc.strerror}") from exc

    def prefault(self) -> None:
        """Maps what waits in the pool, pages included; for a background thread."""
        for size, path in self._pool.files()[-_KEPT_MAPPINGS:]:
            with contextlib.suppress(OSError, ValueError):
                _populate(self._mapping_of(path, size))

    def _mapping_of(self, path: Path, size: int) -> mmap.mmap:
        with path.open("r+b") as file:
            status = os.fstat(file.fileno())
            # A mapping keeps its inode alive, so the number cannot belong to another file by now.
            key = (status.st_dev, status.st_ino)
            with self._lock:
                mapping = self._mappings.pop(key, None)
                if mapping is None or len(mapping) < size:
                    mapping = mmap.mmap(file.fileno(), size)
                self._mappings[key] = mapping
                while len(self._mappings) > _KEPT_MAPPINGS:
                    self._mappings.popitem(last=False)
        return mapping


def _populate(mapping: mmap.mmap) -> None:
    # Through ctypes, which lets go of the interpreter lock: training goes on meanwhile. A kernel before 5.14 refuses,
    # and the first use of the mapping then pays for its faults.
    address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(len(mapping)), ctypes.c_int(_MADV_POPULATE_WRITE))
