"""File locks that end with their process, however it ends."""

import fcntl
from pathlib import Path
from typing import IO


def lock(path: Path, *, shared: bool = False, wait: bool = False) -> IO[bytes] | None:
    """Returns the locked file, to be kept open; None where somebody else holds it and `wait` is not set.

    Raises:
        OSError: the file cannot be made.
    """
    file = path.open("ab+")
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        file.close()
        return None
    return file


def is_held(path: Path, *, shared: bool = False) -> bool:
    """Tells whether a lock cannot be had now; lookers with `shared` do not see each other."""
    file = lock(path, shared=shared)
    if file is None:
        return True
    file.close()
    return False
