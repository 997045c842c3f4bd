"""File locks that end with their process, however it ends."""

import fcntl
import time
from pathlib import Path
from typing import IO

_LOOK_EVERY_S = 0.001


def lock(path: Path, *, shared: bool = False, wait_s: float = 0.0) -> IO[bytes] | None:
    """Returns the locked file, to be kept open; None where somebody else has held it for `wait_s`.

    Raises:
        OSError: the file cannot be made.
    """
    file = path.open("ab+")
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                file.close()
                return None
            # Looking, for flock waits without a bound: its holder may have been stopped, and training with it.
            time.sleep(_LOOK_EVERY_S)
        else:
            return file


def is_held(path: Path, *, shared: bool = False) -> bool:
    """Tells whether a lock cannot be had now; lookers with `shared` do not see each other."""
    file = lock(path, shared=shared)
    if file is None:
        return True
    file.close()
    return False
