"""Emptied tensor files, kept to be filled again: memory that is already there is cheaper than new pages."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

DEFAULT_MAX_POOL_BYTES = 4 * 1024**3


class TensorPool:
    """A folder of tensor files whose content nobody needs any more.

    The shipper gives, the publishers of the host take; both may die at any instruction.

    Args:
        folder: of the pool.
        max_bytes: what would make the pool larger is removed instead.
    """

    def __init__(self, folder: Path, max_bytes: int = DEFAULT_MAX_POOL_BYTES) -> None:
        self._folder, self._max_bytes = folder, max_bytes

    def files(self) -> list[tuple[int, Path]]:
        """Returns the files with their sizes, smallest first."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for path in self._folder.iterdir():
                # Somebody may take it meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    if not path.name.startswith("."):
                        found.append((path.stat().st_size, path))
        return sorted(found)

    def give(self, file: Path) -> None:
        """Takes a file out of its place, into the pool or, where that is full, away."""
        with self._locked():
            status = file.stat()
            if sum(size for size, _ in self.files()) + status.st_size > self._max_bytes:
                file.unlink()
            else:
                # The inode is unique as long as the file exists.
                file.rename(self._folder / str(status.st_ino))

    def take(self, target: Path, size: int) -> None:
        """Makes sure that `target` is there and has `size`, as the file of the pool that fits best, or as a new one.

        Peers that take the same target get the same file, whoever comes first.

        Raises:
            OSError: there is no room; a new file was really reserved, so a later write cannot fail.
        """
        with self._locked():
            if not target.exists():
                files = self.files()
                # The smallest that is large enough; else the largest, which then has to grow the least.
                fitting = [path for available, path in files if available >= size] or [path for _, path in files[-1:]]
                if fitting:
                    fitting[0].rename(target)
            descriptor = os.open(target, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                present = os.fstat(descriptor).st_size
                if size < present:
                    os.ftruncate(descriptor, size)
                elif size > present:
                    # Without a reservation a full disk would show as SIGBUS in the middle of a copy.
                    os.posix_fallocate(descriptor, present, size - present)
            finally:
                os.close(descriptor)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / ".lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
