"""Dumps in local folders: whole or absent, newer replaces older, incomplete never replaces complete."""

import errno
import hashlib
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from fixtures.stored import KEY, MISSING, dump, names, payload_of
from rollcast.consumer.rollout import Missing, OffsetSpan
from rollcast.consumer.store import Dump, LocalDumpStore, Manifest, PublishedDump
from rollcast.consumer.store.describing import worth_of
from rollcast.consumer.store.files import HashingWriter
from rollcast.consumer.store.manifest import manifest_path
from rollcast.consumer.store.reading import parse_manifest
from rollcast.consumer.store.steps import Step
from rollcast.schemas import SHARD_SLOT


@pytest.fixture
def store(tmp_path: Path) -> LocalDumpStore:
    made = LocalDumpStore(f"{tmp_path}/{{run_id}}/{{rollout_id}}.pt")
    made.open()
    return made


def test_a_dump_is_published_with_its_manifest(store: LocalDumpStore, tmp_path: Path) -> None:
    assert store.published(KEY) is None

    published = store.publish(dump())

    assert published.path == tmp_path / "run" / "7.pt"
    assert names(tmp_path / "run") == ["7.pt", "7.pt.manifest.json"]
    assert published.manifest.sha256 == hashlib.sha256(published.path.read_bytes()).hexdigest()
    assert published.manifest.file_bytes == published.path.stat().st_size
    assert len(torch.load(published.path, weights_only=True)["samples"]) == 2
    assert store.published(KEY) == published
    content = json.loads((tmp_path / "run" / "7.pt.manifest.json").read_text(), parse_constant=pytest.fail)
    assert content["complete"] is True
    assert content["offsets"] == {"2": [10, 20]}
    assert content["metrics"]["entropy"]["non_finite_count"] == 2


def test_the_same_payload_gives_the_same_file(store: LocalDumpStore) -> None:
    assert store.publish(dump(7)).manifest.sha256 == store.publish(dump(7)).manifest.sha256
    first, second = dump(8), dump(9)
    payload_of(second)["rollout_id"] = 8
    assert store.publish(first).manifest.sha256 == store.publish(second).manifest.sha256


def test_the_mode_of_a_dump_follows_the_umask(store: LocalDumpStore) -> None:
    before = os.umask(0o027)
    try:
        path = store.publish(dump()).path
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_newer_attempt_replaces_and_the_older_dump_is_kept_aside(
    store: LocalDumpStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = store.publish(dump(attempt=1))

    with caplog.at_level("INFO", logger="rollcast"):
        new = store.publish(dump(attempt=3))

    assert [f"a newer attempt takes the name of {new.path}; what it had stays as 7.attempt-1.pt"] == caplog.messages

    assert names(tmp_path / "run") == [
        "7.attempt-1.pt",
        "7.attempt-1.pt.manifest.json",
        "7.pt",
        "7.pt.manifest.json",
    ]
    kept = parse_manifest(manifest_path(tmp_path / "run" / "7.attempt-1.pt"))
    assert kept == replace(old.manifest, files=(replace(old.manifest.files[0], name="7.attempt-1.pt"),))
    aside = tmp_path / "run" / "7.attempt-1.pt"
    assert hashlib.sha256(aside.read_bytes()).hexdigest() == old.manifest.sha256
    assert store.published(KEY) == new


def test_an_older_or_equal_attempt_changes_nothing(store: LocalDumpStore, tmp_path: Path) -> None:
    new = store.publish(dump(attempt=3))
    before = new.path.stat()

    assert store.publish(dump(attempt=1)) == new
    assert store.publish(dump(attempt=3)) == new
    assert new.path.stat() == before
    assert names(tmp_path / "run") == ["7.pt", "7.pt.manifest.json"]


def test_a_reader_of_the_old_dump_keeps_it(store: LocalDumpStore) -> None:
    path = store.publish(dump(attempt=1)).path
    mapped = torch.load(path, weights_only=True, mmap=True)

    store.publish(dump(attempt=2))

    assert mapped["samples"][0]["entropy"][1] == 1.0


def test_an_incomplete_dump_has_a_name_of_its_own_and_goes_when_the_complete_one_has_come(
    store: LocalDumpStore, tmp_path: Path
) -> None:
    incomplete = store.publish(dump(missing=MISSING))
    assert names(tmp_path / "run") == ["7.incomplete.pt", "7.incomplete.pt.manifest.json"]
    assert incomplete.manifest.missing == MISSING
    assert parse_manifest(manifest_path(incomplete.path)) == incomplete.manifest
    assert store.published(KEY) is None

    store.publish(dump())

    assert names(tmp_path / "run") == ["7.pt", "7.pt.manifest.json"]


def test_an_incomplete_dump_never_replaces_a_complete_one(store: LocalDumpStore, tmp_path: Path) -> None:
    complete = store.publish(dump(attempt=1))

    assert store.publish(dump(attempt=1, missing=MISSING)) == complete
    store.publish(dump(attempt=2, missing=MISSING))

    assert store.published(KEY) == complete
    assert "7.incomplete.pt" in names(tmp_path / "run")


def test_an_incomplete_dump_is_replaced_only_by_one_with_more(store: LocalDumpStore) -> None:
    store.publish(dump(samples=2, missing=MISSING))

    assert store.publish(dump(samples=1, missing=MISSING)).manifest.samples == 2
    assert store.publish(dump(samples=3, missing=MISSING)).manifest.samples == 3


def test_of_two_incomplete_dumps_with_as_many_samples_the_one_that_tells_more_stays(store: LocalDumpStore) -> None:
    refused = Missing(slots=((0, (SHARD_SLOT, 1)),))
    by_worth = [
        dump(missing=MISSING, samples=2),
        dump(missing=MISSING, samples=2, own_columns=True),
        dump(missing=MISSING, samples=2, closing_events=1),
        dump(missing=refused, samples=2, closing_events=2, own_columns=True),
        dump(missing=MISSING, samples=2, closing_events=2, own_columns=True),
        dump(missing=MISSING, samples=3),
        dump(missing=MISSING, samples=1, attempt=2),
    ]
    for index, better in enumerate(by_worth):
        published = store.publish(better)
        assert (published.manifest.id.attempt, published.manifest.samples) == (
            better.rollout.id.attempt,
            better.sample_count,
        )
        assert len(published.manifest.digests) == sum(shard.event is not None for shard in better.rollout.shards)
        assert published.manifest.own_columns == worth_of(better).own_columns
        for worse in by_worth[: index + 1]:
            assert store.publish(worse) == published


def test_into_how_many_parts_its_slots_were_cut_makes_no_incomplete_dump_better(store: LocalDumpStore) -> None:
    finely = dump(missing=MISSING, samples=2, closing_events=1, cut=3)
    coarsely = dump(missing=MISSING, samples=2, closing_events=1)
    first = store.publish(coarsely)
    assert store.publish(finely) == first

    better = dump(missing=MISSING, samples=2, closing_events=1, own_columns=True)
    assert store.publish(better).manifest.own_columns == 1
    assert store.publish(finely).manifest.own_columns == 1


@pytest.mark.parametrize("manifest", [None, "", "{", "[]", '{"format": "other"}', '{"format": "rollcast.manifest/1"}'])
def test_a_dump_without_a_usable_manifest_is_not_published_and_is_written_again(
    store: LocalDumpStore, tmp_path: Path, manifest: str | None
) -> None:
    store.publish(dump())
    path = tmp_path / "run" / "7.pt.manifest.json"
    path.unlink()
    if manifest is not None:
        path.write_text(manifest)

    assert store.published(KEY) is None
    store.publish(dump())
    assert store.published(KEY) is not None


def test_a_crash_between_a_newer_dump_and_its_manifest_keeps_the_right_one_aside(
    store: LocalDumpStore, tmp_path: Path
) -> None:
    old = store.publish(dump(attempt=1))
    manifest_before = (tmp_path / "run" / "7.pt.manifest.json").read_text()
    store.publish(dump(attempt=2))
    (tmp_path / "run" / "7.pt.manifest.json").write_text(manifest_before)

    published = store.published(KEY)
    assert published is not None
    assert published.manifest.id.attempt == 1
    store.publish(dump(attempt=2))

    aside = (tmp_path / "run" / "7.attempt-1.pt").read_bytes()
    assert hashlib.sha256(aside).hexdigest() == old.manifest.sha256
    republished = store.published(KEY)
    assert republished is not None
    assert republished.manifest.id.attempt == 2


def test_manifests_survive_the_round_trip(store: LocalDumpStore) -> None:
    gaps = (OffsetSpan(2, 15, 17), OffsetSpan(2, 30, 30))
    beside_gaps = replace(dump(3, missing=MISSING), gaps=gaps)
    assert store.publish(beside_gaps).manifest.gaps == gaps
    for made in (dump(1), dump(2, missing=MISSING), beside_gaps):
        manifest = store.publish(made).manifest
        assert Manifest.from_json(manifest.to_json()) == manifest


def while_paused(paused: Dump, template: str, do: Callable[[], None]) -> PublishedDump:
    """Publishes `paused` by a store of its own, and calls `do` when its file is there, under a temporary name."""
    reached, released = threading.Event(), threading.Event()

    def pause(step: Step) -> None:
        if step is Step.BEGUN:
            reached.set()
            assert released.wait(30)

    with ThreadPoolExecutor(1) as thread:
        publishing = thread.submit(LocalDumpStore(template, at_step=pause).publish, paused)
        try:
            assert reached.wait(30)
            do()
        finally:
            released.set()
        return publishing.result(30)


def test_a_paused_daemon_cannot_replace_a_published_dump(store: LocalDumpStore, tmp_path: Path) -> None:
    before: list[PublishedDump] = []

    outcome = while_paused(
        dump(attempt=1),
        f"{tmp_path}/{{run_id}}/{{rollout_id}}.pt",
        lambda: before.append(store.publish(dump(attempt=2))),
    )

    assert [outcome] == before
    assert store.published(KEY) == outcome
    assert torch.load(outcome.path, weights_only=True)["samples"][0]["entropy"][1] == 2.0
    assert names(tmp_path / "run") == ["7.pt", "7.pt.manifest.json"]


def test_a_paused_daemon_that_has_the_higher_attempt_keeps_aside_what_came_meanwhile(
    store: LocalDumpStore, tmp_path: Path
) -> None:
    template = f"{tmp_path}/{{run_id}}/{{rollout_id}}.pt"
    before: list[PublishedDump] = []

    outcome = while_paused(dump(attempt=2), template, lambda: before.append(store.publish(dump(attempt=1))))

    assert outcome.manifest.id.attempt == 2
    assert "7.attempt-1.pt" in names(tmp_path / "run")


@pytest.mark.parametrize(
    "meanwhile",
    [
        {"attempt": 2},
        {"attempt": 1},
        {"attempt": 2, "samples": 1, "missing": MISSING},
        {"attempt": 1, "samples": 3, "missing": MISSING},
    ],
)
def test_a_paused_daemon_cannot_replace_what_is_better_than_its_incomplete_dump(
    store: LocalDumpStore, tmp_path: Path, meanwhile: dict[str, Any]
) -> None:
    before: list[PublishedDump] = []

    outcome = while_paused(
        dump(attempt=1, missing=MISSING),
        f"{tmp_path}/{{run_id}}/{{rollout_id}}.pt",
        lambda: before.append(store.publish(dump(**meanwhile))),
    )

    assert [outcome] == before
    assert names(tmp_path / "run") == [outcome.path.name, f"{outcome.path.name}.manifest.json"]


class FullDisk:
    """A file that takes so many bytes and then no more."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, data: Any) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(data)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("room", [0, 100, 700, 1500])
def test_a_full_disk_is_reported_as_such_wherever_it_strikes(
    store: LocalDumpStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    before = store.publish(dump(attempt=1))

    def on_a_full_disk(file: IO[bytes]) -> HashingWriter:
        return HashingWriter(FullDisk(room))  # type: ignore[arg-type]  # write() and flush() are all it needs

    with monkeypatch.context() as patch:
        patch.setattr("rollcast.consumer.store.local.HashingWriter", on_a_full_disk)
        with pytest.raises(OSError, match="No space left") as caught:
            store.publish(dump(attempt=2))

    assert caught.value.errno == errno.ENOSPC
    assert names(tmp_path / "run") == ["7.pt", "7.pt.manifest.json"]
    assert store.published(KEY) == before
