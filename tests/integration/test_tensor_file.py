"""Tensor files that come back from the pool: their content, their mappings, and what a device may have registered."""

from pathlib import Path

import pytest
import torch

from rollcast.producer.errors import SpoolError
from rollcast.producer.spool.locks import lock
from rollcast.producer.spool.pool import TensorPool
from rollcast.producer.spool.tensor_file import TensorFiles


def _filled(files: TensorFiles, path: Path, size: int, value: int) -> int:
    """Fills a file and returns its inode."""
    file = files.open(path, 64, size)
    file.data.fill_(value)
    file.close()
    assert path.read_bytes()[64:] == bytes([value]) * size
    return path.stat().st_ino


def test_a_recycled_file_holds_what_was_written_however_its_size_changes(tmp_path: Path) -> None:
    pool = TensorPool(tmp_path / "pool")
    files, path = TensorFiles(pool), tmp_path / "tensors"
    inodes = set()
    for value, size in enumerate((8 << 20, 4 << 20, 6 << 20, 7 << 20, 3 << 20, 9 << 20)):
        inodes.add(_filled(files, path, size, value))
        pool.give(path)
        files.prefault()
    assert len(inodes) == 1


def test_a_file_whose_size_is_fixed_is_cut_but_never_grows(tmp_path: Path) -> None:
    pool = TensorPool(tmp_path / "pool")
    files, path = TensorFiles(pool), tmp_path / "tensors"
    fixed = _filled(files, path, 8 << 20, 1)
    pool.give(path)
    ((size, file),) = pool.files()
    assert pool.fix_size(file) == size == file.stat().st_size
    assert _filled(files, path, 4 << 20, 2) == fixed
    pool.give(path)
    # A device that registered it at its first size would write this to pages that it has no more.
    grown = _filled(files, path, 6 << 20, 3)
    assert grown != fixed
    pool.give(path)
    assert _filled(files, path, 7 << 20, 4) == grown


def test_a_file_may_be_closed_twice_and_holds_no_memory_then(tmp_path: Path) -> None:
    file = TensorFiles(TensorPool(tmp_path / "pool")).open(tmp_path / "tensors", 64, 100)
    file.close()
    file.close()
    assert torch.equal(file.data, torch.empty(0, dtype=torch.uint8))


def test_a_stopped_process_that_holds_the_pool_does_not_hang_who_takes_from_it(tmp_path: Path) -> None:
    folder = tmp_path / "pool"
    folder.mkdir()
    files = TensorFiles(TensorPool(folder, lock_timeout_s=0.05))
    held = lock(folder / ".lock")
    assert held is not None
    with held, pytest.raises(SpoolError, match=r"another process has held .* is it stopped"):
        files.open(tmp_path / "tensors", 64, 100)
    files.open(tmp_path / "tensors", 64, 100).close()
