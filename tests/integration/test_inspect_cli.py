"""`rollcast inspect` and `rollcast diff`: what a person sees, and one sentence for each file that is no dump."""

import hashlib
import io
import pickle
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from fixtures.command import command, one_sentence
from rollcast.consumer.dump_file import load_dump
from rollcast.consumer.errors import DumpFileError
from rollcast.consumer.metrics import Measuring, Metric
from rollcast.consumer.rollout import Missing, OffsetSpan, RolloutId
from rollcast.consumer.store import Manifest
from rollcast.consumer.store.manifest import ManifestFile, manifest_path
from rollcast.schemas import build_dump_payload

NOTHING_MISSING = Missing()


def dump_file(path: Path, value: float = 0.5) -> str:
    data = {
        "response_lengths": [2, 3],
        "log_probs": [torch.tensor([value, 1.0]), torch.tensor([0.0, 1.0, 2.0])],
        "rewards": [1.0, None],
        "partition": [0, 1],
    }
    shard_of = {"rank": 2, "data_parallel_rank": 0, "rollout_data": data}
    torch.save(build_dump_payload([shard_of], rollout_id=4, writer_rank=2), path)
    return str(path)


def test_equal_dumps_have_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = dump_file(tmp_path / "a.pt"), dump_file(tmp_path / "b.pt")

    assert command(monkeypatch, "diff", a, b) == 0
    assert capsys.readouterr().out == "equal: 2 samples\n"


def test_different_dumps_are_told_by_sample_and_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = dump_file(tmp_path / "a.pt"), dump_file(tmp_path / "b.pt", 0.75)

    assert command(monkeypatch, "diff", a, b) == 1
    assert "samples[0] log_probs: 1 of 2 elements differ, first at [0]: 0.5 against 0.75" in capsys.readouterr().out
    assert command(monkeypatch, "diff", a, b, "--atol", "0.3") == 0
    assert capsys.readouterr().out == "equal within rtol 0, atol 0.3: 2 samples\n"


def test_inspect_shows_rollout_columns_and_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")

    assert command(monkeypatch, "inspect", dump_file(tmp_path / "a.pt")) == 0

    shown = capsys.readouterr().out
    for expected in ("log_probs", "torch.float32", "[2]", "[3]", "data_parallel_rank", "No manifest beside it."):
        assert expected in shown


def test_a_marker_is_shown_with_the_type_of_the_value_that_it_stands_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    data = {"response_lengths": [2], "odd": [Fraction(1, 2)], "mine": {3, 4}, "whole": {"a": 1}}
    shard_of = {"rank": 2, "data_parallel_rank": 0, "rollout_data": data}
    torch.save(build_dump_payload([shard_of], rollout_id=4, writer_rank=2), tmp_path / "a.pt")

    assert command(monkeypatch, "inspect", str(tmp_path / "a.pt")) == 0
    shown = capsys.readouterr().out
    for expected in ("marker for fractions.Fraction", "mine marker for builtins.set", "whole {'a': 1}"):
        assert expected in shown


def test_a_shard_in_the_layout_of_miles_is_inspected_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    data = {"response_lengths": [2, 3], "log_probs": [torch.zeros(2), torch.ones(3)], "global_batch_sizes": [1, 2, 3]}
    for name in ("a.pt", "b.pt"):
        torch.save({"rollout_id": 4, "rank": 8, "rollout_data": data, "cp_size": 1}, tmp_path / name)

    assert command(monkeypatch, "diff", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")) == 0
    assert capsys.readouterr().out == "equal: 2 samples\n"
    assert command(monkeypatch, "inspect", str(tmp_path / "a.pt")) == 0
    shown = capsys.readouterr().out
    for expected in ("rollout_data", "log_probs", "torch.float32", "[2]", "[3]", "cp_size"):
        assert expected in shown


def test_inspect_shows_a_dump_whose_manifest_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.pt.manifest.json").write_text("{")

    assert command(monkeypatch, "inspect", dump_file(tmp_path / "a.pt")) == 0

    shown = capsys.readouterr().out.replace("\n", "")
    assert "log_probs" in shown
    assert "a.pt.manifest.json is not used: not a manifest" in shown


def write_manifest(path: Path, *metrics: Metric, missing: Missing = NOTHING_MISSING) -> Manifest:
    """Writes the manifest of the dump as it stands."""
    manifest = Manifest(
        id=RolloutId("run", 0, 4),
        shards=1,
        samples=2,
        parts=3,
        own_columns=1,
        duplicates=0,
        replaced_values=0,
        raw_bytes=100,
        wire_bytes=50,
        offsets=(OffsetSpan(0, 1, 3),),
        digests=(),
        files=(
            ManifestFile(
                name=path.name, rank=0, sha256=hashlib.sha256(path.read_bytes()).hexdigest(), size=path.stat().st_size
            ),
        ),
        written_at_ms=0,
        metrics=metrics,
        missing=missing,
    )
    manifest_path(path).write_text(manifest.to_json())
    return manifest


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda content: content[:-1], "does not match its manifest: it has "),
        (lambda content: content.replace(b"samples", b"sample5"), "does not match its manifest: its SHA-256 is "),
    ],
)
def test_a_dump_that_does_not_match_its_manifest_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[bytes], bytes],
    sentence: str,
) -> None:
    path = Path(dump_file(tmp_path / "a.pt"))
    write_manifest(path)
    path.write_bytes(change(path.read_bytes()))

    assert command(monkeypatch, "inspect", str(path)) == 2
    assert f"{path} {sentence}" in one_sentence(capsys)


def test_inspect_leaves_the_path_of_a_dump_whole_on_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / f"{'long-' * 30}[b].pt"

    assert command(monkeypatch, "inspect", dump_file(path)) == 0
    assert capsys.readouterr().out.startswith(f"{path}\n")


def test_inspect_breaks_neither_metric_names_nor_the_digest_on_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = Path(dump_file(tmp_path / "a.pt"))
    metrics = Measuring(torch.load(path, weights_only=True)["samples"]).result()
    manifest = write_manifest(path, *metrics, missing=Missing(shards=(1,)))

    assert command(monkeypatch, "inspect", str(path)) == 0
    shown = capsys.readouterr().out
    assert manifest.sha256 in shown
    assert [metric.name for metric in metrics if metric.name not in shown] == []
    assert "rollouts" in shown
    assert "missing" in shown.rpartition("metrics")[2]
    assert "no closing event of 1 shard (" in shown
    assert "Missing(" not in shown


def test_inspect_of_a_policy_loss_call_shows_only_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rank_2_call_7.pt"
    torch.save({"loss": torch.tensor(1.0), "rank": 2, "call": 7, "samples": [{"advantages": torch.zeros(3)}]}, path)
    write_manifest(path)

    assert command(monkeypatch, "inspect", str(path)) == 0
    shown = capsys.readouterr().out
    assert "policy-loss call" in shown
    for absent in ("format version", "None", "metrics", "data-parallel shards"):
        assert absent not in shown


def bytes_of(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "is not a torch file"),
        (b"garbage", "is not a torch file"),
        (pickle.dumps({"samples": []}), "is not a torch file"),
        (b"PK\x03\x04 cut", "is cut short"),
        (bytes_of({"samples": [torch.arange(1000)]})[:2000], "is cut short"),
        (bytes_of({"samples": [Fraction(1, 2)]}), "holds objects that a dump may not hold; it was not loaded"),
    ],
)
@pytest.mark.parametrize("subcommand", [("inspect",), ("diff", "{file}")])
def test_a_file_that_is_no_dump_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
    sentence: str,
    subcommand: Sequence[str],
) -> None:
    path = tmp_path / "bad.pt"
    if content is not None:
        path.write_bytes(content)

    assert command(monkeypatch, *(part.format(file=path) for part in subcommand), str(path)) == 2
    told = one_sentence(capsys)
    assert f"{path} {sentence}" in told
    assert "weights_only" not in told
    # Whoever has not looked at the file before is told the same.
    with pytest.raises(DumpFileError, match=re.escape(f"{path} {sentence}")):
        load_dump(path)


def test_a_file_that_only_ends_like_an_archive_is_no_dump_and_its_end_is_not_looked_for(tmp_path: Path) -> None:
    path = tmp_path / "tail.pt"
    path.write_bytes(b"garbage" + bytes_of({"samples": []}))
    with pytest.raises(DumpFileError, match=r"is not a torch file$"):
        load_dump(path)


@pytest.mark.parametrize("subcommand", [("inspect",), ("diff", "{file}")])
def test_a_folder_in_place_of_a_dump_is_one_sentence_that_tells_what_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], subcommand: Sequence[str]
) -> None:
    assert command(monkeypatch, *(part.format(file=tmp_path) for part in subcommand), str(tmp_path)) == 2
    assert f"{tmp_path} is a folder; give the .pt file of a dump" in one_sentence(capsys)


def test_a_path_at_which_the_system_finds_fault_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A folder that may not be looked into is such a path too, but not for root.
    path = tmp_path / ("x" * 300)
    assert command(monkeypatch, "inspect", str(path)) == 2
    assert f"{path} cannot be read: File name too long" in one_sentence(capsys)


def test_a_torch_file_of_something_else_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save([1, 2], tmp_path / "list.pt")

    assert command(monkeypatch, "inspect", str(tmp_path / "list.pt")) == 2
    assert "no dump" in one_sentence(capsys)
