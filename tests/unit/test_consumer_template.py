"""Dump path templates: two rollouts never share a name."""

import itertools
import re
from pathlib import Path

import pytest

from rollcast.consumer.errors import TemplateError
from rollcast.consumer.rollout import RolloutId
from rollcast.consumer.template import PathTemplate

RUN_IDS = [
    "a",
    "a/b",
    "a-1",
    "../../etc/x",
    "..",
    ".",
    "x" * 300,
    "x" * 301,
    "\u00e9\u4e2d",
    "%2E",
    "a b",
    "{rollout_id}",
    "1",
]


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("dumps/{run_id}.pt", "no {rollout_id}"),
        ("dumps/{rollout_id}.pt", "no {run_id}"),
        ("dumps/{run_id}/{rollout}.pt", "unknown placeholder 'rollout'"),
        ("dumps/{run_id}/{rollout_id:3d}.pt", "has {rollout_id:3d}, a format that cannot be used; write {rollout_id}"),
        ("dumps/{run_id}/{rollout_id:04x}.pt", "has {rollout_id:04x}, a format"),
        ("dumps/{run_id}/{rollout_id:020d}.pt", "has {rollout_id:020d}, a format"),
        ("dumps/{run_id}/{rollout_id:{rank}}.pt", "has {rollout_id:{rank}}, a format"),
        ("dumps/{run_id}/{rollout_id:04d\n}.pt", "a format"),
        ("dumps/{run_id}/{rollout_id!r}.pt", "has {rollout_id!r}, a format"),
        ("dumps/{run_id}/{rollout_id}_{rank:02d}.pt", "has {rank:02d}, a format that cannot be used; write {rank}"),
        ("dumps/{run_id!r}/{rollout_id}.pt", "has {run_id!r}, a format"),
        ("dumps/{}/{rollout_id}.pt", "unknown placeholder"),
        ("dumps/{run_id}{rollout_id}.pt", "between two placeholders"),
        ("dumps/{run_id}0{rollout_id}.pt", "between two placeholders"),
        ("dumps/{rollout_id}/{run_id}.pt", "after {run_id}"),
        ("dumps/{run_id}/{rollout_id}/{rollout_id}.pt", "one {rollout_id}"),
        ("dumps/{run_id}/{rollout_id}_{rank}_{rank}.pt", "at most one {rank}"),
        ("dumps/{run_id}/{rollout_id}{attempt}.pt", "between two placeholders"),
        ("dumps/{rank}/{run_id}/{rollout_id}.pt", "after {run_id}"),
        ("dumps/{run_id}/{attempt}/{rollout_id}.pt", "put it into the file's"),
        ("dumps/{run_id}/{rollout_id}/{rank}/dump.pt", "put it into the file's"),
        ("dumps/{run_id}-{rollout_id}.pt", "'7-7.attempt-1.pt' beside one dump pass"),
        ("dumps/{run_id}-{rollout_id}", "'7-7.attempt-1.pt' beside one dump pass"),
        ("dumps/{run_id}.attempt-{rollout_id}.pt", "beside one dump pass"),
        ("dumps/{run_id/{rollout_id}.pt", "not a template"),
        ("dumps/{run_id}/{rollout_id.pt", "not a template"),
    ],
)
def test_a_template_under_which_dumps_could_meet_is_refused(template: str, problem: str) -> None:
    with pytest.raises(TemplateError, match=re.escape(problem)):
        PathTemplate(template)


@pytest.mark.parametrize(
    ("template", "mended"),
    [
        ("dumps/{run_id}/{rollout_id}", "dumps/{run_id}/{rollout_id}.pt"),
        ("dumps/{run_id}/{rollout_id:06d}/", "dumps/{run_id}/{rollout_id:06d}.pt"),
        ("dumps/{run_id}/{rollout_id}.pth", "dumps/{run_id}/{rollout_id}.pt"),
        ("dumps/{run_id}/{rollout_id}.PT", "dumps/{run_id}/{rollout_id}.pt"),
        ("dumps.pt/{run_id}/{rollout_id}.{attempt}", "dumps.pt/{run_id}/{rollout_id}.{attempt}.pt"),
        ("dumps/{run_id}/v1.2_{rollout_id}", "dumps/{run_id}/v1.2_{rollout_id}.pt"),
    ],
)
def test_a_template_without_the_suffix_of_dumps_is_refused_with_one_that_is_right(template: str, mended: str) -> None:
    with pytest.raises(TemplateError) as caught:
        PathTemplate(template)
    assert str(caught.value) == f"dump path {template!r} does not end with .pt; write {mended!r}"
    assert PathTemplate(mended).path(RolloutId("run", 1, 7), 0).suffix == ".pt"


def test_a_dump_of_several_files_needs_ranks_in_their_names() -> None:
    with pytest.raises(TemplateError, match=re.escape("has no {rank}")):
        PathTemplate("dumps/{run_id}/{rollout_id}.pt", several_files=True)


@pytest.mark.parametrize(
    "template",
    [
        "/d/{run_id}/{rollout_id}_{rank}.pt",
        "/d/{run_id}_{rank}-x{attempt}_{rollout_id}.pt",
        "/d/{run_id}/{run_id}.{rollout_id}.r{rank}.{attempt}.pt",
        "/d/{run_id}/{rollout_id:02d}_{rank}_{attempt}.pt",
    ],
)
def test_every_file_and_what_stands_beside_it_has_a_path_of_its_own(template: str) -> None:
    made = PathTemplate(template, several_files=True)
    rollouts = [RolloutId(*each) for each in itertools.product(RUN_IDS, (1, 11), (0, 1, 11))]
    files = [made.path(rollout, rank) for rollout in rollouts for rank in (0, 1, 11)]
    if "{attempt}" not in template:
        files = list(dict.fromkeys(files))
    bases = {made.base(rollout) for rollout in rollouts}

    beside = {
        made.beside(path, word) for path in (*files, *bases) for word in ("incomplete", "attempt-1", "attempt-11")
    }

    assert len(set(files)) == len(files)
    assert len(beside) == 3 * len({*files, *bases})
    assert not beside & {*files, *bases}
    assert not bases & set(files)
    assert {path.parent for path in beside} == {path.parent for path in files}


@pytest.mark.parametrize(
    "template",
    [
        "/d/{run_id}/{rollout_id}.pt",
        "/d/{run_id}/{rollout_id:02d}.pt",
        "/d/{run_id}_x{rollout_id}.pt",
        "/d/{run_id}_{rollout_id}/dump.pt",
        "/d/{run_id}_{rollout_id:019d}/dump.pt",
    ],
)
def test_every_rollout_of_every_run_has_its_own_path_inside_the_folder(template: str) -> None:
    made = PathTemplate(template)
    rollouts = [*itertools.product(RUN_IDS, (0, 1, 11, 2**40))]

    paths = [made.path(RolloutId(run_id, 1, rollout_id), 0) for run_id, rollout_id in rollouts]

    assert len(set(paths)) == len(rollouts)
    for path in paths:
        assert path.is_relative_to("/d")
        assert ".." not in path.parts
        assert all(len(part.encode()) < 200 for part in path.parts)


def test_rollouts_padded_with_zeros_stand_in_their_order() -> None:
    made = PathTemplate("/d/{run_id}/{rollout_id:04d}.pt")
    names = [made.path(RolloutId("a", 1, rollout_id), 0).name for rollout_id in (0, 9, 10, 999, 1000, 9999)]
    assert names == sorted(names)
    assert names[1] == "0009.pt"
    assert made.path(RolloutId("a", 1, 12_345), 0).name == "12345.pt"


def test_a_relative_template_gives_absolute_paths() -> None:
    assert PathTemplate("{run_id}/{rollout_id}.pt").path(RolloutId("a", 1, 1), 0) == Path.cwd() / "a" / "1.pt"


@pytest.mark.parametrize(
    ("template", "paths"),
    [
        (
            "d/{run_id}/{rollout_id}.pt",
            ["d/a/policy_loss_debug/rank_3_call_7.pt", "d/b/policy_loss_debug/rank_3_call_7.pt"],
        ),
        (
            "d/{run_id}_{rollout_id}.pt",
            ["d/a/policy_loss_debug/rank_3_call_7.pt", "d/b/policy_loss_debug/rank_3_call_7.pt"],
        ),
    ],
)
def test_policy_loss_calls_stand_in_a_folder_of_their_run(template: str, paths: list[str]) -> None:
    made = PathTemplate(template)
    found = [made.path(RolloutId(run_id, 1, 7, "policy-loss/3"), 0) for run_id in ("a", "b")]
    assert found == [Path.cwd() / path for path in paths]
