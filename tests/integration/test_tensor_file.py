"""Tensor files that come back from the pool: their content, their mappings, and what a device may have registered."""

import errno
import os
import resource
import time
from pathlib import Path

import pytest
import torch

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


def test_a_discarded_file_keeps_no_memory_once_it_is_removed(tmp_path: Path) -> None:
    file = TensorFiles(TensorPool(tmp_path / "pool")).open(tmp_path / "tensors", 64, 100)
    assert f"{tmp_path}/tensors" in Path("/proc/self/maps").read_text()
    file.discard()
    file.discard()
    assert f"{tmp_path}/tensors" not in Path("/proc/self/maps").read_text()


def test_who_finds_the_pool_locked_by_a_stopped_process_soon_takes_a_new_file(tmp_path: Path) -> None:
    pool = TensorPool(tmp_path / "pool")
    files = TensorFiles(pool)
    recycled = _filled(files, tmp_path / "first", 4096, 1)
    pool.give(tmp_path / "first")
    held = lock(tmp_path / "pool" / ".lock")
    assert held is not None
    started = time.monotonic()
    with held:
        assert _filled(files, tmp_path / "second", 4096, 2) != recycled
    assert time.monotonic() - started < 5
    assert _filled(files, tmp_path / "third", 4096, 3) == recycled


def test_a_file_that_a_peer_has_made_meanwhile_is_not_replaced_by_a_recycled_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = TensorPool(tmp_path / "pool")
    pool.take(tmp_path / "first", 4096)
    pool.give(tmp_path / "first")
    target = tmp_path / "second"
    hardlink_to = Path.hardlink_to

    def late(path: Path, source: Path) -> None:
        # A peer comes that finds the pool locked.
        TensorPool(tmp_path / "pool").take(path, 4096)
        target.write_bytes(b"x" * 4096)
        hardlink_to(path, source)

    monkeypatch.setattr(Path, "hardlink_to", late)
    pool.take(target, 4096)
    assert target.read_bytes() == b"x" * 4096
    assert len(pool.files()) == 1


def test_a_peer_that_wants_less_cuts_no_file_that_another_is_filling(tmp_path: Path) -> None:
    files, path = TensorFiles(TensorPool(tmp_path / "pool")), tmp_path / "tensors"
    file = files.open(path, 64, 8 << 20)
    TensorFiles(TensorPool(tmp_path / "pool")).open(path, 64, 100).close()
    # Were it shorter now, filling it would be a SIGBUS, and the trainer's end.
    assert path.stat().st_size == 64 + (8 << 20)
    file.data.fill_(1)


def test_a_recycled_file_has_its_size_before_a_peer_can_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = TensorPool(tmp_path / "pool")
    pool.take(tmp_path / "first", 8192)
    pool.give(tmp_path / "first")
    hardlink_to, sizes = Path.hardlink_to, []

    def look(path: Path, source: Path) -> None:
        sizes.append(source.stat().st_size)
        hardlink_to(path, source)

    monkeypatch.setattr(Path, "hardlink_to", look)
    pool.take(tmp_path / "second", 4096)
    assert sizes == [4096]
    assert not pool.files()


def test_where_files_cannot_have_two_names_each_bundle_gets_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, source: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    pool = TensorPool(tmp_path / "pool")
    pool.take(tmp_path / "first", 4096)
    pool.give(tmp_path / "first")
    monkeypatch.setattr(Path, "hardlink_to", refuse)
    pool.take(tmp_path / "second", 4096)
    assert (tmp_path / "second").stat().st_size == 4096
    assert len(pool.files()) == 1


def test_a_file_of_the_pool_that_a_bundle_has_already_is_nobody_elses(tmp_path: Path) -> None:
    pool = TensorPool(tmp_path / "pool")
    pool.take(tmp_path / "first", 4096)
    pool.give(tmp_path / "first")
    # What a process leaves that dies between the two steps of taking a file.
    ((_, path),) = pool.files()
    (tmp_path / "first").hardlink_to(path)
    pool.take(tmp_path / "second", 4096)
    assert not (tmp_path / "second").samefile(tmp_path / "first")
    pool.give(tmp_path / "first")
    (tmp_path / "first").unlink()
    assert [size for size, _ in pool.files()] == [4096]


def test_whichever_file_of_the_pool_comes_next_costs_no_page_faults(tmp_path: Path) -> None:
    pool, pages = TensorPool(tmp_path / "pool"), 256
    paths = [tmp_path / f"tensors-{index}" for index in range(20)]
    theirs = TensorFiles(pool)
    for path in paths:
        _filled(theirs, path, pages * 4096, 1)
    for path in paths:
        pool.give(path)
    ours = TensorFiles(pool)
    ours.prefault()
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for path in paths:
        file = ours.open(path, 64, pages * 4096)
        file.data.fill_(2)
        file.close()
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < len(paths) * pages / 10


def test_a_file_that_finds_no_room_in_the_pool_leaves_its_memory_though_processes_have_it_mapped(
    tmp_path: Path,
) -> None:
    pool = TensorPool(tmp_path / "pool", max_bytes=4096)
    files, path = TensorFiles(pool), tmp_path / "tensors"
    _filled(files, path, 1 << 20, 1)
    with path.open("rb") as kept:
        pool.give(path)
        assert not path.exists()
        assert os.fstat(kept.fileno()).st_size == 0
