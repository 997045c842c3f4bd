"""Emptied tensor files, kept to be filled again: memory that is already there is cheaper than new pages."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from rollcast.producer.spool.locks import lock

DEFAULT_MAX_POOL_BYTES = 4 * 1024**3
MAX_POOL_FILES = 64
"""Most files in a pool; each publish looks at all of them, and each process keeps them mapped."""

# A file that is cut down to a much smaller bundle loses the pages for which it was kept.
_MAX_CUT = 4
_SMALL_BYTES = 1024**2
_LOCK_TIMEOUT_S = 20.0
# For who is about to publish: a new file is dearer than a recycled one, but not as dear as a long wait.
_TAKE_TIMEOUT_S = 0.03
# On a file of the pool this bit says that the file must not grow; it has no other meaning there.
_FIXED = stat.S_ISVTX


class TensorPool:
    """A folder of tensor files whose content nobody needs any more.

    The shipper gives, the publishers of the host take; both may die at any instruction.

    Args:
        folder: of the pool.
        max_bytes: what would make the pool larger is removed instead.
        lock_timeout_s: longest wait for another process that gives or takes, which may have been stopped; who takes
            waits for an instant only.
    """

    def __init__(
        self, folder: Path, max_bytes: int = DEFAULT_MAX_POOL_BYTES, lock_timeout_s: float = _LOCK_TIMEOUT_S
    ) -> None:
        self._folder, self._max_bytes, self._lock_timeout_s = folder, max_bytes, lock_timeout_s

    def files(self) -> list[tuple[int, Path]]:
        """Returns the files with their sizes, smallest first."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for path in self._folder.iterdir():
                # Somebody may take it meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    # One that has another name was taken by a process that died before it had removed this one.
                    if not path.name.startswith(".") and status.st_nlink == 1:
                        found.append((status.st_size, path))
        return sorted(found)

    def give(self, file: Path) -> None:
        """Takes a file out of its place into the pool, from which the oldest ones go where that is full."""
        with self._locked():
            status = file.stat()
            files = self.files()
            held, count = sum(size for size, _ in files), len(files)
            for size, path in sorted(files, key=_age) if status.st_size <= self._max_bytes else ():
                if held + status.st_size <= self._max_bytes and count < MAX_POOL_FILES:
                    break
                _remove(path)
                held -= size
                count -= 1
            if held + status.st_size > self._max_bytes:
                _remove(file)
            else:
                # The inode is unique as long as the file exists.
                file.rename(self._folder / str(status.st_ino))

    def take(self, target: Path, size: int) -> None:
        """Makes sure that `target` is there and has `size`, as the file of the pool that fits best, or as a new one.

        Peers that take the same target get the same file, whoever comes first, and whether or not they find the pool
        locked: then it is a new one. It is never cut: a peer that wants another size may be filling it already.

        Raises:
            OSError: there is no room; what is new of the file was really reserved, so a later write cannot fail.
        """
        with contextlib.suppress(TimeoutError), self._locked(_TAKE_TIMEOUT_S):
            if not target.exists():
                self._recycle(target, size)
        # Under no lock: it takes a while, and peers that do it at the same time do the same.
        try:
            _reserve(target, size)
        except OSError as exc:
            if exc.errno not in {errno.ENOSPC, errno.EDQUOT}:
                raise
            # Files that nobody needs must not be what fills the disk.
            with contextlib.suppress(TimeoutError), self._locked(_TAKE_TIMEOUT_S):
                for _, path in self.files():
                    _remove(path)
            _reserve(target, size)

    def _recycle(self, target: Path, size: int) -> None:
        files = self.files()
        # Else the largest of the smaller ones, which has to grow the least.
        fitting = [path for available, path in files if _fits(available, size)] or [
            path for available, path in files if available < size and not path.stat().st_mode & _FIXED
        ][-1:]
        if fitting:
            # Not renamed: a peer that found the pool locked may have made the target meanwhile, and be filling it. Nor
            # do all file systems have second names. Either way a file that is not recycled is a new one.
            with contextlib.suppress(OSError):
                if fitting[0].stat().st_size > size:
                    # Before a peer can map it: who writes to pages that were cut off is killed.
                    os.truncate(fitting[0], size)
                target.hardlink_to(fitting[0])
                fitting[0].unlink()

    def fix_size(self, file: Path) -> int:
        """Returns the size of a file of the pool, which may be cut from now on, but never grows again.

        For files that are registered with CUDA. A device writes to the pages that the file had then; a file that is
        cut and grows again has others in their place, so what the device writes there would be lost.

        Raises:
            OSError: the file is not there any more, or another user's.
        """
        with self._locked():
            status = file.stat()
            if not status.st_mode & _FIXED:
                file.chmod(stat.S_IMODE(status.st_mode) | _FIXED)
            return status.st_size

    def keep_spares(self, count: int, size: int) -> None:
        """Makes files of `size` until the pool has `count` that would do for it; for a background thread.

        One process does it at a time; the others return at once. None is made beyond the pool's bound, or where it
        would take more than half of the room that the disk has left.

        Raises:
            OSError: the disk does not take it.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        making = lock(self._folder / ".spare.lock")
        if making is None:
            return
        with making:
            while self._wants_spare(count, size):
                # Reserved under no lock that a publish waits for.
                spare = self._folder / ".spare"
                _reserve(spare, size)
                with self._locked():
                    spare.rename(self._folder / str(spare.stat().st_ino))

    def _wants_spare(self, count: int, size: int) -> bool:
        files = self.files()
        if sum(_fits(available, size) for available, _ in files) >= count:
            return False
        disk = os.statvfs(self._folder)
        within = sum(available for available, _ in files) + size <= self._max_bytes
        return within and 2 * size <= disk.f_bavail * disk.f_frsize

    @contextlib.contextmanager
    def _locked(self, timeout_s: float | None = None) -> Iterator[None]:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / ".lock"
        timeout_s = self._lock_timeout_s if timeout_s is None else timeout_s
        held = lock(path, wait_s=timeout_s)
        if held is None:
            raise TimeoutError(errno.ETIMEDOUT, f"another process has held {path} for {timeout_s:g} s; is it stopped?")
        with held:
            yield


def _fits(available: int, size: int) -> bool:
    return size <= available <= max(_MAX_CUT * size, _SMALL_BYTES)


def _age(file: tuple[int, Path]) -> float:
    # The rename into the pool sets it.
    return file[1].stat().st_ctime


def _remove(file: Path) -> None:
    # Mappings that processes keep would keep the pages too.
    os.truncate(file, 0)
    file.unlink()


def _reserve(file: Path, size: int) -> None:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        present = os.fstat(descriptor).st_size
        if size > present:
            disk = os.fstatvfs(descriptor)
            if size - present > disk.f_bavail * disk.f_frsize:
                # Not tried: until it fails it would take the last room from what is being committed meanwhile.
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
            # Without a reservation a full disk would show as SIGBUS in the middle of a copy.
            os.posix_fallocate(descriptor, present, size - present)
    finally:
        os.close(descriptor)
