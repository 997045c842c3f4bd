"""A process that dies while it publishes a dump: nothing half, nothing mixed, and the next one ends in the right state.

The dump has two files, replaces an older attempt of other ranks, makes an incomplete dump obsolete, and has the
retention remove another rollout: so every step there is takes place.
"""

import hashlib
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fixtures.crashing import ELEMENTS, RANKS, Crashing, crashing, store
from fixtures.stored import KEY, MISSING, dump
from rollcast.consumer.rollout import RolloutKey
from rollcast.consumer.store.files import LOCK_NAME, TEMP_SUFFIX
from rollcast.consumer.store.manifest import Manifest
from rollcast.consumer.store.steps import Step
from rollcast.consumer.template import MANIFEST_SUFFIX

TRIES = 20
MOST_TRIES = 100
NEEDED_BYTES = 1_000_000_000
OLD_RANKS = (0, 9)
REMOVED = "5_rank.pt.removed.json"


@pytest.fixture(scope="module")
def program() -> Iterator[Crashing]:
    with crashing() as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, if there is room: what a kill leaves does not depend on the disk, only the time does."""
    memory = Path("/dev/shm")  # noqa: S108 - the folder in it has a name of its own
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > NEEDED_BYTES
    with tempfile.TemporaryDirectory(dir=memory if roomy else tmp_path) as made:
        yield Path(made)


def prepare(folder: Path) -> None:
    """Has an older attempt of rollout 7, an incomplete dump of the newer attempt, and rollout 5."""
    kept = store(folder)
    kept.open()
    kept.publish(dump(7, ranks=OLD_RANKS))
    kept.publish(dump(7, attempt=2, ranks=RANKS, missing=MISSING))
    kept.publish(dump(5, ranks=RANKS))


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "run").iterdir()} - {LOCK_NAME}


def check_what_is_there(folder: Path) -> None:
    """Whatever has a name is whole; a file that is described is the one that the manifest describes."""
    for path in (folder / "run").iterdir():
        if path.suffix == ".pt":
            payload = torch.load(path, weights_only=True)
            values = payload["samples"][0]["entropy"][1:]
            assert values[0] in (1.0, 2.0)
            assert bool((values == values[0]).all())
        elif path.name.endswith(MANIFEST_SUFFIX):
            manifest = Manifest.from_json(path.read_text())
            for file in manifest.files:
                described = path.with_name(file.name)
                assert not described.exists() or digest(described) == file.sha256


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_recovery(folder: Path) -> None:
    """The next process sweeps, publishes the dump if it is not, and goes on."""
    check_what_is_there(folder)
    next_one = store(folder)
    next_one.open()
    assert not [name for name in names(folder) if name.endswith(TEMP_SUFFIX)]

    published = next_one.publish(dump(7, attempt=2, samples=1, ranks=RANKS, elements=ELEMENTS))

    assert next_one.published(KEY) == published
    assert published.manifest.id.attempt == 2
    check_what_is_there(folder)
    of_rollout_5 = {name for name in names(folder) if name.startswith("5_")}
    if REMOVED in of_rollout_5:
        assert of_rollout_5 == {REMOVED}
    assert names(folder) - of_rollout_5 == {
        *("7_0.pt", "7_3.pt", "7_rank.pt.manifest.json"),
        *("7_0.attempt-1.pt", "7_9.attempt-1.pt", "7_rank.attempt-1.pt.manifest.json"),
    }

    next_one.publish(dump(8, attempt=2, ranks=RANKS))

    gone = next_one.published(RolloutKey("run", 5))
    assert gone is not None
    assert gone.removed
    assert names(folder) == {REMOVED, "7_rank.pt.removed.json", "8_0.pt", "8_3.pt", "8_rank.pt.manifest.json"}


@pytest.mark.parametrize("step", Step)
def test_killed_at_any_step_nothing_is_half_and_the_next_process_ends_right(
    program: Crashing, folder: Path, step: Step
) -> None:
    prepare(folder)

    outcome = program.publish(folder, step=step)

    assert outcome.killed
    check_recovery(folder)


@pytest.mark.timeout(300)
def test_killed_at_any_moment_nothing_is_half_and_the_next_process_ends_right(program: Crashing, folder: Path) -> None:
    def place(number: int) -> Path:
        made = folder / str(number)
        prepare(made)
        return made

    whole = program.publish(place(0))
    assert not whole.killed
    shortest_s = whole.seconds
    moments = random.Random(11)  # noqa: S311 - not for secrets
    killed = 0
    for number in range(1, MOST_TRIES):
        outcome = program.publish(place(number), after_s=moments.uniform(0, shortest_s))
        if outcome.killed:
            check_recovery(folder / str(number))
            killed += 1
        else:
            # It was quicker this time; the next one is killed sooner.
            shortest_s = min(shortest_s, outcome.seconds)
        shutil.rmtree(folder / str(number))
        if killed == TRIES:
            return
    pytest.fail(f"only {killed} of {MOST_TRIES} tries were killed before they had ended")
