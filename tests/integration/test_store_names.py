"""Dumps with ranks and attempts in their names, files of others, and what the retention removes."""

import os
from pathlib import Path

import pytest

from fixtures.stored import KEY, MISSING, dump
from rollcast.consumer.dump_file import load_dump
from rollcast.consumer.errors import QuotaError
from rollcast.consumer.retention import Retention
from rollcast.consumer.rollout import RolloutKey
from rollcast.consumer.store import LocalDumpStore, Manifest, inventory
from rollcast.consumer.store.files import LOCK_NAME
from rollcast.consumer.store.manifest import manifest_path
from rollcast.consumer.store.reading import parse_manifest, usable
from rollcast.consumer.verification import verify


def store(
    folder: Path, name: str = "{rollout_id}.pt", retention: Retention | None = None, *, several_files: bool = False
) -> LocalDumpStore:
    made = LocalDumpStore(
        f"{folder}/{{run_id}}/{name}", several_files=several_files, retention=retention or Retention()
    )
    made.open()
    return made


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "run").iterdir()} - {LOCK_NAME}


def sound(folder: Path) -> bool:
    return all(verdict.problem is None for verdict in verify(folder))


def test_where_names_have_attempts_each_dump_stays_and_the_highest_counts(tmp_path: Path) -> None:
    kept = store(tmp_path, "{rollout_id}.{attempt}.pt")
    kept.publish(dump(attempt=1))
    kept.publish(dump(attempt=10, missing=MISSING))
    first = kept.published(KEY)
    ten = kept.publish(dump(attempt=10))
    kept.publish(dump(attempt=9))
    kept.publish(dump(70, attempt=20))

    assert first is not None
    assert first.path.name == "7.1.pt"
    assert kept.published(KEY) == ten
    assert names(tmp_path) == {
        *("7.1.pt", "7.1.pt.manifest.json", "7.10.pt", "7.10.pt.manifest.json"),
        *("70.20.pt", "70.20.pt.manifest.json"),
    }
    assert sound(tmp_path)


@pytest.mark.parametrize(
    ("name", "path"), [("{rollout_id:04d}.pt", "0007.pt"), ("{rollout_id:04d}.{attempt}.pt", "0007.2.pt")]
)
def test_a_dump_whose_rollout_is_padded_is_found_and_removed_as_any_other(tmp_path: Path, name: str, path: str) -> None:
    kept = store(tmp_path, name, Retention(keep_last=1))
    kept.publish(dump(attempt=1))
    second = kept.publish(dump(attempt=2))
    assert second.path == tmp_path / "run" / path
    assert kept.published(KEY) == second
    assert sound(tmp_path)

    kept.publish(dump(12_345, attempt=2))
    assert path not in names(tmp_path)
    assert (removed := kept.published(KEY)) is not None
    assert removed.manifest.id.attempt == 2


def test_a_dump_of_several_files_has_one_manifest_and_replaces_files_of_other_ranks(tmp_path: Path) -> None:
    kept = store(tmp_path, "{rollout_id}_{rank}.pt", several_files=True)
    kept.publish(dump(ranks=(0, 1), attempt=2, missing=MISSING))
    kept.publish(dump(ranks=(0, 4)))

    newer = kept.publish(dump(ranks=(0, 2), attempt=2))

    assert newer.path.name == "7_rank.pt.manifest.json"
    assert [file.name for file in newer.manifest.files] == ["7_0.pt", "7_2.pt"]
    assert len(newer.manifest.sha256) == 64
    assert kept.published(KEY) == newer
    assert names(tmp_path) == {
        *("7_0.pt", "7_2.pt", "7_rank.pt.manifest.json"),
        *("7_0.attempt-1.pt", "7_4.attempt-1.pt", "7_rank.attempt-1.pt.manifest.json"),
    }
    assert sound(tmp_path)


def test_a_dump_that_lacks_one_of_its_files_is_not_published(tmp_path: Path) -> None:
    kept = store(tmp_path, "{rollout_id}_{rank}.pt", several_files=True)
    kept.publish(dump(ranks=(0, 1)))
    (tmp_path / "run" / "7_1.pt").unlink()

    assert kept.published(KEY) is None
    kept.publish(dump(ranks=(0, 1)))
    assert kept.published(KEY) is not None
    assert sound(tmp_path)


def test_a_file_of_somebody_else_is_kept_and_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "7.pt").write_bytes(b"not ours")

    published = store(tmp_path).publish(dump())

    (other,) = (tmp_path / "run").glob("7.unknown-*.pt")
    assert other.read_bytes() == b"not ours"
    assert len(load_dump(published.path)["samples"]) == 2


def test_the_same_dump_that_a_crash_has_left_without_a_manifest_is_taken_over(tmp_path: Path) -> None:
    kept = store(tmp_path)
    manifest_path(kept.publish(dump()).path).unlink()

    kept.publish(dump())

    assert names(tmp_path) == {"7.pt", "7.pt.manifest.json"}


def test_a_removed_dump_leaves_its_manifest_and_is_not_published_again(tmp_path: Path) -> None:
    kept = store(tmp_path, retention=Retention(keep_last=2, keep_every=4, pinned=frozenset({1})))
    for rollout_id in range(8):
        kept.publish(dump(rollout_id))
    dumps = {name for name in names(tmp_path) if name.endswith(".pt")}
    before = names(tmp_path)

    again = store(tmp_path).publish(dump(3))

    assert dumps == {"0.pt", "1.pt", "4.pt", "6.pt", "7.pt"}
    assert {name for name in before if name.startswith("3.")} == {"3.pt.removed.json"}
    assert again.removed
    assert again.manifest.id.rollout_id == 3
    assert names(tmp_path) == before
    assert sound(tmp_path)


def test_a_higher_attempt_of_a_removed_dump_is_published(tmp_path: Path) -> None:
    kept = store(tmp_path, retention=Retention(keep_last=1))
    for rollout_id in range(3):
        kept.publish(dump(rollout_id))

    kept.publish(dump(0, attempt=2))

    assert names(tmp_path) == {"0.pt", "0.pt.manifest.json", "1.pt.removed.json", "2.pt.removed.json"}
    assert sound(tmp_path)


@pytest.mark.parametrize("name", ["{rollout_id}.pt", "{rollout_id}.{attempt}.pt"])
def test_older_attempts_go_with_the_dump(tmp_path: Path, name: str) -> None:
    kept = store(tmp_path, name, Retention(keep_last=1))
    kept.publish(dump(1, attempt=1))
    kept.publish(dump(1, attempt=2))
    kept.publish(dump(2, attempt=2))

    assert {each.split(".")[0] for each in names(tmp_path) if not each.endswith(".removed.json")} == {"2"}
    removed = kept.published(RolloutKey("run", 1))
    assert removed is not None
    assert removed.removed
    assert removed.manifest.id.attempt == 2


def test_incomplete_dumps_and_other_runs_are_not_removed(tmp_path: Path) -> None:
    other = tmp_path / "run2"
    store(tmp_path).publish(dump(1, missing=MISSING))
    LocalDumpStore(f"{other}/{{run_id}}/{{rollout_id}}.pt").publish(dump(1))
    kept = store(tmp_path, retention=Retention(keep_last=1))
    kept.publish(dump(2))
    kept.publish(dump(3))

    assert names(tmp_path) == {
        *("1.incomplete.pt", "1.incomplete.pt.manifest.json"),
        *("2.pt.removed.json", "3.pt", "3.pt.manifest.json"),
    }
    assert names(other) == {"1.pt", "1.pt.manifest.json"}


def test_a_dump_that_does_not_fit_into_the_quota_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    size = store(tmp_path).publish(dump(1)).manifest.file_bytes
    kept = store(tmp_path, retention=Retention(max_bytes=size + size // 2, pinned=frozenset({1})))
    before = names(tmp_path)

    with pytest.raises(QuotaError):
        kept.publish(dump(2))
    assert names(tmp_path) == before

    roomy = store(tmp_path, retention=Retention(max_bytes=2 * size, pinned=frozenset({1})))
    roomy.publish(dump(2))
    roomy.publish(dump(3))
    assert {name for name in names(tmp_path) if name.endswith(".pt")} == {"1.pt", "3.pt"}


def test_a_manifest_tells_where_a_dump_came_from_and_what_was_dropped(tmp_path: Path) -> None:
    published = store(tmp_path).publish(dump())

    manifest = parse_manifest(manifest_path(published.path))

    assert manifest is not None
    assert manifest.duplicates == 3
    assert [(span.partition, span.first, span.last) for span in manifest.offsets] == [(2, 10, 20)]
    assert manifest.versions.keys() == {"python", "torch", "rollcast"}


def test_what_is_left_of_a_newer_attempt_is_not_overwritten_by_an_older_one(tmp_path: Path) -> None:
    kept = store(tmp_path, "{rollout_id}_{rank}.pt", several_files=True)
    kept.publish(dump(ranks=(0, 1), attempt=2))
    left = (tmp_path / "run" / "7_0.pt").read_bytes()
    (tmp_path / "run" / "7_1.pt").unlink()

    kept.publish(dump(ranks=(0, 1), attempt=1))

    assert (tmp_path / "run" / "7_0.attempt-2.pt").read_bytes() == left


def test_a_withdrawn_attempt_leaves_the_others_published(tmp_path: Path) -> None:
    kept = store(tmp_path, "{rollout_id}.{attempt}.pt")
    one = kept.publish(dump(attempt=1))
    two = kept.publish(dump(attempt=2))

    kept.withdraw(two.manifest.id)

    assert kept.published(KEY) == one
    assert kept.publish(dump(attempt=2)).path == two.path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The manifests that the retention has read."""
    read: list[Path] = []

    def note(path: Path) -> Manifest | None:
        read.append(path)
        return usable(path)

    monkeypatch.setattr(inventory, "usable", note)
    return read


def test_the_retention_reads_a_manifest_once_and_again_when_it_is_another(tmp_path: Path, reads: list[Path]) -> None:
    for number in range(20):
        store(tmp_path).publish(dump(number))
    kept = store(tmp_path, retention=Retention(max_bytes=10**9))
    kept.publish(dump(20))
    assert len(reads) == 20
    kept.publish(dump(21))
    assert [path.name for path in reads[20:]] == ["20.pt.manifest.json"]
    store(tmp_path).publish(dump(3, attempt=2))
    reads.clear()

    kept.publish(dump(22))

    assert {path.name for path in reads} == {
        "21.pt.manifest.json",
        "3.pt.manifest.json",
        "3.attempt-1.pt.manifest.json",
    }


def test_what_another_process_has_published_or_removed_counts_for_the_retention(tmp_path: Path) -> None:
    size = store(tmp_path).publish(dump(0)).manifest.file_bytes
    kept = store(tmp_path, retention=Retention(max_bytes=3 * size + size // 2))
    kept.publish(dump(1))
    for name in ("0.pt", "0.pt.manifest.json"):
        (tmp_path / "run" / name).unlink()
    store(tmp_path).publish(dump(2))
    kept.publish(dump(3))
    assert {name for name in names(tmp_path) if name.endswith(".pt")} == {"1.pt", "2.pt", "3.pt"}

    kept.publish(dump(4))

    assert {name for name in names(tmp_path) if name.endswith(".pt")} == {"2.pt", "3.pt", "4.pt"}


@pytest.mark.parametrize("harm", ["folder", "pipe", "garbage", "huge"])
def test_what_stands_for_a_manifest_and_is_none_holds_up_neither_retention_nor_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    monkeypatch.setattr("rollcast.consumer.store.reading._MAX_BYTES", 100_000)
    kept = store(tmp_path, retention=Retention(keep_last=2))
    kept.publish(dump(1))
    odd = tmp_path / "run" / "0.pt.manifest.json"
    if harm == "folder":
        odd.mkdir()
    elif harm == "pipe":
        os.mkfifo(odd)
    else:
        odd.write_bytes(b"garbage" if harm == "garbage" else b" " * 200_000)

    for number in (2, 3):
        kept.publish(dump(number))

    assert kept.published(RolloutKey("run", 0)) is None
    assert {name for name in names(tmp_path) if name.endswith(".pt")} == {"2.pt", "3.pt"}
    (bad,) = [verdict for verdict in verify(tmp_path) if verdict.problem is not None]
    assert bad.path == odd
    assert "not a manifest" in str(bad.problem)
