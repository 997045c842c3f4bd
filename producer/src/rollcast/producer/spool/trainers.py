"""Who publishes a run from a spool: one lock for each rank, held for as long as its process lives."""

from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rollcast.producer.errors import SpoolError
from rollcast.producer.spool.locks import is_held, lock

_PATTERN = ".rank-*.lock"


@dataclass(frozen=True, slots=True)
class LivingTrainer:
    """A process that publishes a run.

    Attributes:
        attempt: its attempt.
        process: its process id.
    """

    attempt: int
    process: int


def living_trainers(run_folder: Path) -> list[LivingTrainer]:
    """Returns the processes that are publishing a run; ranks that start together do not see each other."""
    found = []
    for path in sorted(run_folder.glob(_PATTERN)):
        if is_held(path, shared=True):
            words = path.read_bytes().split()
            # Whoever has just locked it may not have written it yet.
            if len(words) == 2 and all(word.isdigit() for word in words):
                found.append(LivingTrainer(int(words[0]), int(words[1])))
    return found


def register(run_folder: Path, rank: int, trainer: LivingTrainer) -> IO[bytes]:
    """Marks a rank of a run as living for as long as the returned file is open.

    Where an older trainer with this rank lives, another file is taken: both are living.

    Raises:
        SpoolError: one with the same attempt has come first.
    """
    for name in (f".rank-{rank}.lock", f".rank-{rank}-{trainer.process}.lock"):
        file = lock(run_folder / name)
        if file is not None:
            file.truncate(0)
            file.write(f"{trainer.attempt} {trainer.process}".encode())
            file.flush()
            return file
        if any(other.attempt == trainer.attempt for other in living_trainers(run_folder)):
            break
    raise SpoolError(f"attempt {trainer.attempt} of this run is published by another process of {run_folder.parent}")
