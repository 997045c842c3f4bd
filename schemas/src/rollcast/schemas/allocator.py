"""The C library's allocator, as processes need it that move megabytes all the time."""

import ctypes

# Of glibc's <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_HEAP_BLOCK_BYTES = 32 * 1024 * 1024
_KEPT_BYTES = 64 * 1024 * 1024


def keep_freed_memory() -> None:
    """Has the allocator keep up to 64 MiB that was freed, in each of its arenas, for what is allocated next.

    By default it gives a buffer of some hundred KiB back to the system at once, and the next one costs a page fault
    every 4 KiB, which can take longer than what is done with it. Without glibc nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
