"""`rollcast verify`: sound, damaged, miscounted, and what no manifest describes."""

import errno
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.stored import MISSING, dump, payload_of
from rollcast.consumer.cli import main
from rollcast.consumer.store import LocalDumpStore, Manifest
from rollcast.consumer.store.files import file_sha256
from rollcast.consumer.store.manifest import manifest_path
from rollcast.consumer.store.reading import tombstone_path


def verify(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["rollcast", "verify", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = LocalDumpStore(f"{tmp_path}/{{run_id}}/{{rollout_id}}.pt")
    store.open()
    store.publish(dump(1))
    store.publish(dump(1, attempt=2))
    store.publish(dump(2, missing=MISSING))
    several = LocalDumpStore(f"{tmp_path}/other/{{run_id}}/{{rollout_id}}_{{rank}}.pt", several_files=True)
    several.publish(dump(3, ranks=(0, 4)))
    return tmp_path


def test_all_dumps_below_a_folder_are_verified(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(monkeypatch, folder) == 0

    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "4 sound, 0 bad"
    assert [line.partition(":")[0] for line in lines] == [
        f"ok   {folder}/other/run/3_rank.pt.manifest.json",
        f"ok   {folder}/run/1.attempt-1.pt",
        f"ok   {folder}/run/1.pt",
        f"ok   {folder}/run/2.incomplete.pt",
    ]
    assert "2 samples, 0 shards" in lines[1]
    assert "incomplete: 1 slot not whole" in lines[3]


@pytest.mark.parametrize("name", ["run/1.pt", "run/1.pt.manifest.json", "other/run/3_4.pt", "run/1.attempt-1.pt"])
def test_a_dump_is_named_by_any_of_its_files_or_its_manifest(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert verify(monkeypatch, "--quiet", folder / name) == 0


def test_a_file_that_was_kept_aside_is_told_and_is_no_fault_until_it_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "run" / "1.pt"
    path.write_bytes(b"somebody else's")
    manifest_path(path).unlink()
    LocalDumpStore(f"{folder}/{{run_id}}/{{rollout_id}}.pt").publish(dump(1, attempt=2))
    (kept,) = (folder / "run").glob("1.unknown-*.pt")

    assert verify(monkeypatch, folder) == 0
    told = capsys.readouterr().out
    assert told.endswith("4 sound, 0 bad, 1 kept aside\n")
    assert f"kept {kept}: it had a dump's name and another content; may be deleted" in told
    assert verify(monkeypatch, "--quiet", folder) == 0
    assert str(kept) not in capsys.readouterr().out

    kept.write_bytes(b"changed")
    assert verify(monkeypatch, folder) == 1
    assert f"BAD  {kept}: its SHA-256 is " in capsys.readouterr().out


@pytest.mark.parametrize("described", [False, True])
def test_a_folder_where_a_dump_should_be_is_told_with_no_command_that_cannot_mend_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], described: bool
) -> None:
    path = folder / "run" / "1.pt"
    path.unlink()
    path.mkdir()
    if not described:
        manifest_path(path).unlink()

    assert verify(monkeypatch, "--quiet", folder) == 1
    (bad, count) = capsys.readouterr().out.splitlines()
    assert bad.startswith(f"BAD  {path}")
    assert bad.endswith(" is a folder where a dump should be; move it away")
    assert count == "3 sound, 1 bad"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def changed(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def miscounted(path: Path) -> None:
    rewrite(path, samples=3)


def of_another_rollout(path: Path) -> None:
    manifest = Manifest.from_json(manifest_path(path).read_text())
    rewrite(path, id=replace(manifest.id, rollout_id=9))


def rewrite(path: Path, **changes: Any) -> None:
    manifest = Manifest.from_json(manifest_path(path).read_text())
    manifest_path(path).write_text(replace(manifest, **changes).to_json())


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (cut, "does not match its manifest: it has "),
        (changed, "does not match its manifest: its SHA-256 is "),
        (Path.unlink, "cannot be read: No such file"),
        (miscounted, "it has 2 samples, its manifest tells of 3"),
        (lambda path: rewrite(path, shards=2), "it has 0 shards, its manifest tells of 2"),
        (of_another_rollout, "is of rollout 1, its manifest of rollout 9"),
        (lambda path: manifest_path(path).write_bytes(b"\xff"), "not a manifest"),
        (lambda path: manifest_path(path).write_bytes(b"[" * 100_000), "not a manifest"),
        (
            lambda path: manifest_path(path).write_text(
                re.sub(r'"attempt": ?\d+', '"attempt": Infinity', manifest_path(path).read_text())
            ),
            "not a manifest",
        ),
        (lambda path: manifest_path(path).unlink(), "no manifest describes it"),
    ],
)
def test_what_is_not_sound_is_told_and_the_status_is_1(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    harm: Callable[[Path], object],
    told: str,
) -> None:
    harm(folder / "run" / "1.pt")

    assert verify(monkeypatch, "--quiet", folder) == 1
    *bad, last = capsys.readouterr().out.splitlines()
    assert told in bad[0]
    assert bad[0].startswith(f"BAD  {folder}/run/1.pt")
    assert last.startswith("3 sound, ")


def test_what_is_bad_is_told_once_with_the_command_that_makes_it_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = LocalDumpStore(f"{folder}/{{run_id}}/{{rollout_id}}.pt")
    for rollout_id in (5, 6, 8):
        store.publish(dump(rollout_id))
    cut(folder / "run" / "5.pt")
    (folder / "run" / "6.pt").unlink()
    cut(folder / "run" / "8.pt")
    cut(folder / "run" / "1.attempt-1.pt")

    assert verify(monkeypatch, "--quiet", folder) == 1
    lines = capsys.readouterr().out.splitlines()
    command = "  rollcast rebuild --bootstrap HOST:PORT --dump-path TEMPLATE --run run"
    assert [line for line in lines if "rebuild" in line] == [f"{command} --rollout 5..6", f"{command} --rollout 8"]
    (told,) = [line for line in lines if "5.pt" in line]
    assert told.count("5.pt") == 1


def test_a_bad_manifest_and_its_dump_are_one_fault_and_the_command_leaves_open_which_rollout_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest_path(folder / "run" / "1.pt").write_bytes(b"\xff")
    assert verify(monkeypatch, "--quiet", folder) == 1
    bad, _, command, last = capsys.readouterr().out.splitlines()
    assert bad.startswith(f"BAD  {folder}/run/1.pt.manifest.json: not a manifest")
    assert command.endswith("--run RUN --rollout ROLLOUT")
    assert last == "3 sound, 1 bad"


def inline(path: Path) -> None:
    """Writes a dump as a trainer does, which has no manifest."""
    torch.save(payload_of(dump(7)), path)


def test_what_a_trainer_wrote_inline_is_told_as_that_with_no_command_that_cannot_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, half = tmp_path / "7.pt", tmp_path / "8.pt"
    inline(whole)
    inline(half)
    cut(half)

    assert verify(monkeypatch, tmp_path) == 1
    first, second, last = capsys.readouterr().out.splitlines()
    assert first == (
        f"BAD  {whole}: no manifest describes it, as none does what a trainer writes inline; it loads, with 2 samples, "
        "but nothing tells whether they are the right ones"
    )
    assert second == f"BAD  {half} is cut short: the end of the archive is missing; no manifest describes it"
    assert last == "0 sound, 2 bad"

    close(monkeypatch, half)
    assert verify(monkeypatch, half) == 1
    assert f"shut {half} cannot be read: Permission denied" in capsys.readouterr().out


def test_a_dump_asked_for_by_name_that_is_not_there_has_no_command_unless_the_retention_took_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "run" / "1.pt"
    manifest_path(path).rename(tombstone_path(path))
    for is_left in (True, False):
        assert verify(monkeypatch, path) == 1
        bad, _, command, last = capsys.readouterr().out.splitlines()
        assert bad.startswith(f"BAD  {path}: the retention has removed it, as 1.pt.removed.json says")
        assert command.endswith("--run run --rollout 1")
        assert last == "0 sound, 1 bad"
        if is_left:
            path.unlink()
    tombstone_path(path).unlink()
    assert verify(monkeypatch, path) == 1
    assert capsys.readouterr().out == f"BAD  {path}: it is not there\n0 sound, 1 bad\n"


def test_a_warning_is_shown_once_however_many_dumps_it_is_met_with(folder: Path) -> None:
    run = folder / "run"
    manifest_path(run / "1.pt").write_bytes(b"\xff")
    for name in ("a.pt", "b.pt"):
        (run / name).touch()
    command = [sys.executable, "-m", "rollcast.consumer.cli", "verify", str(run / "a.pt"), str(run / "b.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.count("1.pt.manifest.json is ignored: not a manifest") == 1


def test_a_folder_that_may_not_be_looked_into_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed, scandir = str(folder / "other"), os.scandir

    def refusing(path: str) -> Any:
        if path == closed:
            # The tests may run as root, to whom no folder is closed.
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    assert verify(monkeypatch, "--quiet", folder) == 1
    told = capsys.readouterr().out
    assert f"shut {closed}: it cannot be looked into: Permission denied" in told
    assert told.endswith("3 sound, 0 bad, 1 shut\n")


def close(monkeypatch: pytest.MonkeyPatch, closed: Path) -> None:
    """Makes a file one that this user may not read; not by its mode, which root may pass by."""

    def refusing(opens: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(path: Any, *rest: Any, **options: Any) -> Any:
            if path == closed:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return opens(path, *rest, **options)

        return refuse

    for module in (os, io):
        monkeypatch.setattr(module, "open", refusing(module.open))


@pytest.mark.parametrize("which", ["run/1.pt", "run/1.pt.manifest.json"])
@pytest.mark.parametrize("asked", ["", "run/1.pt"])
def test_what_this_user_may_not_read_is_not_called_bad_and_not_to_be_made_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], which: str, asked: str
) -> None:
    close(monkeypatch, folder / which)
    assert verify(monkeypatch, "--quiet", folder / asked) == 1
    shut, remedy, last = capsys.readouterr().out.splitlines()
    assert shut.startswith(f"shut {folder}/run/1.pt")
    assert shut.endswith("cannot be read: Permission denied")
    assert "this user may not read them" in remedy
    assert last.endswith(" sound, 0 bad, 1 shut")


def test_a_dump_with_a_bad_file_is_bad_though_this_user_may_not_read_another_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (folder / f"other/run/3_{rank}.pt" for rank in (0, 4))
    close(monkeypatch, first)
    assert verify(monkeypatch, "--quiet", folder) == 1
    assert capsys.readouterr().out.endswith("3 sound, 0 bad, 1 shut\n")
    cut(second)
    assert verify(monkeypatch, "--quiet", folder) == 1
    told = capsys.readouterr().out
    assert f"{second} does not match its manifest" in told
    assert told.endswith("3 sound, 1 bad\n")


def test_a_dump_that_needs_code_to_load_is_not_sound_and_the_code_is_not_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    published = LocalDumpStore(f"{folder}/{{run_id}}/{{rollout_id}}.pt").publish(dump(4))
    path, manifest = published.path, published.manifest
    torch.save({**payload_of(dump(4)), "odd": Fraction(1, 2)}, path)
    described = replace(manifest.files[0], sha256=file_sha256(path), size=path.stat().st_size)
    manifest_path(path).write_text(replace(manifest, files=(described,)).to_json())

    assert verify(monkeypatch, path) == 1
    assert "holds objects that a dump may not hold" in capsys.readouterr().out


@pytest.mark.parametrize("content", [[1], {"model": {}, "step": Fraction(1, 2)}])
def test_a_checkpoint_beside_the_dumps_is_told_as_that_and_is_no_fault(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: object
) -> None:
    path = folder / "run" / "checkpoint.pt"
    torch.save(content, path)

    assert verify(monkeypatch, folder) == 0
    told = capsys.readouterr().out
    assert f"else {path} " in told
    assert told.endswith("4 sound, 0 bad, 1 of something else\n")
    assert verify(monkeypatch, "--quiet", folder) == 0
    assert capsys.readouterr().out == "4 sound, 0 bad, 1 of something else\n"
    assert verify(monkeypatch, path) == 1
    assert capsys.readouterr().out.endswith(f"no dump is in {path}, 1 of something else\n")


def test_a_dump_without_a_manifest_that_damage_makes_another_thing_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "7.pt"
    inline(path)
    content = path.read_bytes()
    for whole, damaged in ((b"samples", b"sbmples"), (b"OrderedDict", b"OrdfredDict")):
        assert whole in content
        path.write_bytes(content.replace(whole, damaged))
        assert verify(monkeypatch, path) == 1
        assert f"BAD  {path} is damaged: its objects do not have their checksum" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["", "absent.pt", "absent.pt.manifest.json", "x" * 300])
def test_where_no_dump_is_the_status_is_1_and_the_place_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert verify(monkeypatch, tmp_path / name) == 1
    assert str(tmp_path / name) in capsys.readouterr().out
