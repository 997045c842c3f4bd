"""Mapped files that cannot be read any more: an error instead of SIGBUS, which would end the process."""

import ctypes
import errno
import mmap

import numpy as np

from rollcast.producer.errors import SpoolError

_MADV_POPULATE_READ = 22
_libc = ctypes.CDLL(None, use_errno=True)


def require_whole(data: bytes | memoryview) -> None:
    """Returns if the file that data is mapped from, if any, is still as long as it was; costs next to nothing.

    Raises:
        SpoolError: it was cut short.
    """
    mapping = data.obj if isinstance(data, memoryview) else None
    if isinstance(mapping, mmap.mmap) and mapping.size() < len(mapping):
        raise SpoolError(f"its tensor file was cut short while it was read: {mapping.size()} of {len(mapping)} bytes")


def require_readable(data: bytes | memoryview) -> None:
    """Brings the pages of a mapped file into memory, so that reading them cannot fail right afterwards.

    A kernel before 5.14 does nothing.

    Raises:
        SpoolError: the file was cut short.
        OSError: its disk does not give it back.
    """
    array = np.frombuffer(data, np.uint8)
    if not array.nbytes:
        return
    address = array.ctypes.data
    before = address % mmap.PAGESIZE
    failed = _libc.madvise(
        ctypes.c_void_p(address - before),
        ctypes.c_size_t(array.nbytes + before),
        ctypes.c_int(_MADV_POPULATE_READ),
    )
    if failed and ctypes.get_errno() == errno.EFAULT:
        require_whole(data)
        raise OSError(errno.EIO, "its tensor file cannot be read from the disk")
