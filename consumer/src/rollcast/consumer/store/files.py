"""Files that appear whole or not at all."""

import contextlib
import fcntl
import hashlib
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np

TEMP_SUFFIX = ".rollcast.tmp"
LOCK_NAME = ".rollcast.lock"
_LOCK_TIMEOUT_S = 10.0
_LOCK_LOOK_EVERY_S = 0.02
_BLOCK_BYTES = 1024 * 1024
_BLOCKS = 4


@contextlib.contextmanager
def temporary_beside(path: Path) -> Iterator[tuple[Path, IO[bytes]]]:
    """Yields a new file in the directory of `path`, locked while it is written; removes it at the end if still there.

    The name is cut so that it fits wherever `path` itself fits. Its mode follows the umask.
    """
    tail = f".{secrets.token_hex(4)}{TEMP_SUFFIX}"
    name = os.fsencode(f".{path.name}")[: 255 - len(tail)].decode(errors="ignore") + tail
    temporary = path.with_name(name)
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            # The lock tells `sweep` of another process that the writer lives.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield temporary, file
    finally:
        temporary.unlink(missing_ok=True)


def write_durably(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Replaces `path` by what `write` writes, at once and durably.

    Raises:
        OSError: it could not; `path` is as before.
    """
    with temporary_beside(path) as (temporary, file):
        write(file)
        sync_file(file)
        temporary.replace(path)
    sync_directory(path.parent)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Waits for the lock of a directory and holds it; it ends with the process that holds it.

    The lock is a file of its own, which stays: some network file systems cannot lock a directory.

    Raises:
        TimeoutError: another process has it for too long; it may have been stopped.
    """
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    with (directory / LOCK_NAME).open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as exc:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{directory / LOCK_NAME} is held by another process for {_LOCK_TIMEOUT_S:g} s; is it stopped?"
                    ) from exc
                time.sleep(_LOCK_LOOK_EVERY_S)
        yield


def sync_file(file: IO[bytes]) -> None:
    """Returns when the bytes of the file are on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Returns when the names in the directory are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    """Returns the digest of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_directory(directory: Path) -> None:
    """Makes a directory and its parents, durably."""
    if directory.is_dir():
        return
    missing = [directory]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    directory.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_directory(made.parent)


def sweep(directory: Path) -> list[Path]:
    """Removes the temporary files that no living process writes; returns them."""
    swept = []
    for path in sorted(directory.glob(f".*{TEMP_SUFFIX}")):
        with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            swept.append(path)
    return swept


class HashingWriter:
    """Counts bytes, digests them and passes them on to a file.

    The digest and the file get them in a thread each, while the caller makes the next ones. As a context manager: after
    it, all is passed on.

    Attributes:
        size: bytes taken.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._threads = tuple(ThreadPoolExecutor(1, f"rollcast-{work}") for work in ("write", "digest"))
        self._blocks = tuple(np.empty(_BLOCK_BYTES, np.uint8) for _ in range(_BLOCKS))
        self._filled = 0
        self._passing: deque[tuple[Future[object], ...]] = deque()
        self.size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Returns when everything is passed on, or when nothing more will be.

        Raises:
            OSError: the file did not take it.
        """
        with ExitStack() as ends:
            for thread in self._threads:
                ends.enter_context(thread)
            if error is None:
                self._pass_on()
                self._wait(most=0)

    def write(self, data: bytes | memoryview) -> None:
        """Takes all of `data`, which is bytes.

        Raises:
            OSError: the file did not take what came before.
        """
        rest = np.frombuffer(data, np.uint8)
        self.size += len(rest)
        while len(rest):
            piece = rest[: _BLOCK_BYTES - self._filled]
            self._blocks[0][self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
            rest = rest[len(piece) :]
            if self._filled == _BLOCK_BYTES:
                self._pass_on()

    def sha256(self) -> str:
        """Returns the digest of what was passed on, hex."""
        return self._digest.hexdigest()

    def _pass_on(self) -> None:
        block = self._blocks[0][: self._filled].data
        jobs: tuple[Callable[[memoryview], object], ...] = (self._file.write, self._digest.update)
        self._passing.append(tuple(thread.submit(job, block) for thread, job in zip(self._threads, jobs, strict=True)))
        self._blocks = (*self._blocks[1:], self._blocks[0])
        self._filled = 0
        self._wait(most=_BLOCKS - 1)

    def _wait(self, most: int) -> None:
        """Returns when at most so many blocks are being passed on."""
        while len(self._passing) > most:
            # Without a variable, by which a failed job, its error and this frame would keep each other and the dump.
            deque(map(Future.result, self._passing.popleft()), maxlen=0)
