"""Files that appear whole or not at all, and get every byte."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fixtures.stored import names
from rollcast.consumer.store import LocalDumpStore
from rollcast.consumer.store.files import HashingWriter, sweep, temporary_beside


@pytest.mark.parametrize("last", [0, 1, 2**20 - 1, 2**20, 2**20 + 1, 5 * 2**20 + 3])
def test_a_file_gets_every_byte_and_the_digest_is_theirs(tmp_path: Path, last: int) -> None:
    pieces = [os.urandom(size) for size in (0, 1, 700_000, 2**20, last)]
    threads = threading.active_count()
    with (tmp_path / "file").open("wb") as file, HashingWriter(file) as writer:
        for piece in pieces:
            writer.write(piece)
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)
    assert writer.size == sum(map(len, pieces))
    assert writer.sha256() == hashlib.sha256(b"".join(pieces)).hexdigest()
    assert threading.active_count() == threads


def test_temporary_files_of_dead_writers_are_swept_and_those_of_living_ones_kept(tmp_path: Path) -> None:
    store = LocalDumpStore(f"{tmp_path}/{{run_id}}/{{rollout_id}}.pt")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".7.pt.0123.rollcast.tmp").touch()
    (folder / ".strange.tmp").touch()

    with temporary_beside(folder / "8.pt") as (living, _):
        store.open()
        assert names(folder) == sorted([living.name, ".strange.tmp"])
    assert names(folder) == [".strange.tmp"]


def test_a_name_as_long_as_a_file_name_can_be_has_room_for_its_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / ("\u00e9" * 127)
    with temporary_beside(path) as (temporary, _):
        assert len(os.fsencode(temporary.name)) <= 255


def test_killed_in_mid_write_the_name_is_absent_and_the_leftover_swept(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, time\n"
        "from rollcast.consumer.store.files import temporary_beside\n"
        "with temporary_beside(pathlib.Path(sys.argv[1])) as (_, file):\n"
        "    file.write(b'half'); file.flush(); print('writing', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "7.pt")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    assert sweep(tmp_path) == []

    process.send_signal(signal.SIGKILL)
    process.communicate()

    assert not (tmp_path / "7.pt").exists()
    assert len(sweep(tmp_path)) == 1
    assert names(tmp_path) == []
