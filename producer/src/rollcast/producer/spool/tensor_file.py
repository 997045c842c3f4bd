"""The tensor file of a bundle: safetensors layout, size and offsets known before the first byte is there."""

import contextlib
import ctypes
import errno
import json
import mmap
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from rollcast.producer.errors import SpoolError, SpoolFullError
from rollcast.producer.mover import can_pin, pin, unpin
from rollcast.producer.plan import PlannedColumn, ShardRecords
from rollcast.producer.rank_order import RankOrder
from rollcast.producer.spool.pool import MAX_POOL_FILES, TensorPool
from rollcast.producer.spool.read import HEAD_LENGTH_BYTES

_ALIGNMENT = 64
# As many as a process may be given next.
_KEPT_MAPPINGS = MAX_POOL_FILES
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None)
_JSON_BYTES_A_CHARACTER = 12
_JSON_BYTES_A_NUMBER = 21
_JSON_BYTES_AN_ENTRY = 160
_to_json = json.JSONEncoder(separators=(",", ":")).encode
_SAFETENSORS_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def head_size(columns: Sequence[PlannedColumn]) -> int:
    """Returns the room for the file's head, the same on every peer; more than it takes, for it may be padded.

    So the head itself need not be there before the copies are made.
    """
    text = len("{}")
    for column in columns:
        entry = len(column.name) * _JSON_BYTES_A_CHARACTER + _JSON_BYTES_AN_ENTRY
        text += entry * len(column.sizes) + sum(map(len, column.shapes)) * _JSON_BYTES_A_NUMBER
    return HEAD_LENGTH_BYTES + text + -(HEAD_LENGTH_BYTES + text) % _ALIGNMENT


def head_for(columns: Sequence[PlannedColumn]) -> bytes:
    """Returns the file's head, length field included; dtypes that the format lacks are listed as bytes."""
    length = head_size(columns) - HEAD_LENGTH_BYTES
    text = f"{{{','.join(_entries(columns))}}}".encode().ljust(length)
    return length.to_bytes(HEAD_LENGTH_BYTES, "little") + text


def _entries(columns: Sequence[PlannedColumn]) -> Iterator[str]:
    # Text at once: thousands of objects would have the garbage collector walk through the whole trainer.
    for column in columns:
        for tensor in column.tensors():
            dtype = _SAFETENSORS_NAMES.get(tensor.dtype)
            entry = {
                "dtype": dtype or "U8",
                "shape": list(tensor.shape) if dtype else [tensor.size],
                "data_offsets": [tensor.offset, tensor.offset + tensor.size],
            }
            yield f"{_to_json(f'{tensor.slot}.{tensor.leaf}.{column.name}')}:{_to_json(entry)}"


def finish_tensor_file(path: Path, records: ShardRecords) -> None:
    """Adds the head, and puts what context-parallel ranks have copied in order."""
    head = head_for(records.columns)
    split = [
        (order, len(head) + column.offsets[0])
        for column in records.columns
        if isinstance(order := column.copied_by, RankOrder)
    ]
    # Once for all, for new memory costs as much as the bytes. From the start of a page: into memory that begins a few
    # bytes behind one, as Python's own does, some processors read a file at a third of the speed.
    room = memoryview(mmap.mmap(-1, max([1, *(order.largest_block for order, _ in split)]), flags=mmap.MAP_PRIVATE))
    with path.open("r+b") as file:
        file.write(head)
        for order, column_at in split:
            order.put_in_order(file.fileno(), column_at, room)


class TensorFile:
    """A tensor file that is being filled.

    Attributes:
        data: the bytes behind the head, as a uint8 tensor over the mapping.
    """

    def __init__(
        self, files: "TensorFiles", mapping: "_Mapping", key: tuple[int, int], head_bytes: int, data_bytes: int
    ) -> None:
        self.data = mapping.data[head_bytes : head_bytes + data_bytes]
        self._files, self._key, self._size = files, key, head_bytes + data_bytes
        # Kept as it is: a device may be writing to it when it is forgotten elsewhere.
        self._mapping: _Mapping | None = mapping

    def is_at(self, path: Path) -> bool:
        """Tells whether a path leads to this file, and it has the size that was asked for."""
        with contextlib.suppress(OSError):
            status = path.stat()
            return (status.st_dev, status.st_ino) == self._key and status.st_size == self._size
        return False

    def close(self) -> None:
        """Gives the file up, which keeps what was written; may be called again."""
        self.data = torch.empty(0, dtype=torch.uint8)
        self._mapping = None

    def discard(self) -> None:
        """Gives the file up with what was written; may be called again."""
        self.close()
        self._files.forget(self._key)


class _Mapping:
    """Maps a file of the spool until the last reference to it is gone.

    Attributes:
        data: the file's bytes.
        prepared_at: when the file had last changed places when it was prepared.
        is_pinned: its pages are registered with CUDA.
        was_filled: this process has filled the file before, so it may do so again.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.data = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        self.prepared_at = 0
        self.is_pinned = False
        self.was_filled = False

    def populate(self) -> None:
        """Brings its pages into memory."""
        # Through ctypes, which lets go of the interpreter lock: training goes on meanwhile. A kernel before 5.14
        # refuses, and the first use of the mapping then pays for its faults.
        _libc.madvise(
            ctypes.c_void_p(self.data.data_ptr()), ctypes.c_size_t(self.data.nbytes), ctypes.c_int(_MADV_POPULATE_WRITE)
        )

    def pin(self, size: int) -> None:
        """Lets devices write to its first bytes by themselves."""
        self.is_pinned = pin(self.data[:size])
        if self.is_pinned:
            # Before the memory goes: CUDA would take whatever has its address next for these pages. Not at exit, when
            # CUDA may be gone already.
            weakref.finalize(self, unpin, self.data.data_ptr()).atexit = False


class TensorFiles:
    """Opens tensor files in one process, and keeps their mappings for the next time.

    A file comes back from the pool with its pages in memory; with its mapping kept, filling it again costs no page
    fault, and a fault costs more than the copy of the page.

    Args:
        pool: of the spool.
    """

    def __init__(self, pool: TensorPool) -> None:
        self._pool = pool
        self._mappings: OrderedDict[tuple[int, int], _Mapping] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, path: Path, head_bytes: int, data_bytes: int) -> TensorFile:
        """Opens a file to be filled; of all peers that open it, the first creates it.

        Raises:
            SpoolFullError: the disk has no room.
            SpoolError: the file cannot be created.
        """
        size = head_bytes + data_bytes
        try:
            self._pool.take(path, size)
            key, mapping = self._mapping_of(path, size)
            mapping.was_filled = True
            return TensorFile(self, mapping, key, head_bytes, data_bytes)
        except OSError as exc:
            if exc.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
                raise SpoolFullError(f"no room for {size} bytes at {path}; free space or choose another spool") from exc
            raise SpoolError(f"{path} cannot be created: {exc.strerror}") from exc

    def forget(self, key: tuple[int, int]) -> None:
        """Lets go of the mapping of a file that will not come back, which would keep its memory when it is removed.

        Args:
            key: device and inode.
        """
        with self._lock:
            self._mappings.pop(key, None)

    def prefault(self) -> None:
        """Prepares what waits in the pool; for a background thread."""
        for size, path in self._pool.files():
            with contextlib.suppress(OSError, ValueError):
                # Set by the rename into the pool. Once for each stay there: looking at pages that are in memory
                # already takes 60 ms of processor time a GiB.
                changed_at = path.stat().st_ctime_ns
                _, mapping = self._mapping_of(path, size)
                if mapping.prepared_at == changed_at:
                    continue
                mapping.populate()
                mapping.prepared_at = changed_at
                # Registering takes long, and ranks of one host share the pool: not what only others use.
                if can_pin() and mapping.was_filled and not mapping.is_pinned:
                    mapping.pin(self._pool.fix_size(path))

    def _mapping_of(self, path: Path, size: int) -> tuple[tuple[int, int], _Mapping]:
        with path.open("r+b") as file:
            status = os.fstat(file.fileno())
            # A mapping keeps its inode alive, so the number cannot belong to another file by now.
            key = (status.st_dev, status.st_ino)
            with self._lock:
                mapping = self._mappings.pop(key, None)
                if mapping is None or mapping.data.nbytes < size:
                    mapping = _Mapping(file.fileno(), size)
                self._mappings[key] = mapping
                while len(self._mappings) > _KEPT_MAPPINGS:
                    self._mappings.popitem(last=False)
        return key, mapping
