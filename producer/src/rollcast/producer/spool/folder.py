"""Names and places in the spool folder.

<spool>/.shipper-<hash>.lock      held by the one shipper for a destination; without hash: for all of them
<spool>/.trainers.lock           held, shared, by every live writer
<spool>/.host-token              tells whether two ranks see the same folder
<spool>/.stats-<run>-rank<n>.json counters of a rank, for the shipper's `/metrics`
<spool>/<run>/.rank-<n>.lock     held by the rank that publishes the run, with its attempt and process id
<spool>/<run>/.destination       Kafka address and topic prefix that the run is published for
<spool>/<run>/<bundle>/          a committed bundle
<spool>/<run>/.<bundle>.filling/ a bundle that its peers are filling
<spool>/<run>/.<bundle>.marking/ the mark of a dropped rollout, in the making
<spool>/.poison/<run>/<bundle>/  a bundle that cannot be shipped, with the reason
<spool>/.pool/                   emptied tensor files, to be filled again
"""

import contextlib
import hashlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rollcast.producer.errors import SpoolError
from rollcast.producer.spool.locks import is_held, lock
from rollcast.producer.spool.pool import TensorPool
from rollcast.producer.spool.read import TENSORS_NAME
from rollcast.schemas.topics import file_name_for

_LOCK_TIMEOUT_S = 20.0
_NAME = re.compile(r"([0-9]+)-a([0-9]+)-((?:dp|loss)[0-9]+)\Z")
_DESTINATION, _POOL = ".destination", ".pool"
# Stands in every new file system of its own, such as a volume that is mounted for a spool.
_LOST_AND_FOUND = "lost+found"
_FILLING, _MARKING, _LEAVING = ".filling", ".marking", ".leaving"


def destination_of(bootstrap_servers: str, topic_prefix: str) -> str:
    """Returns the name of where records go, Kafka's address and the topic prefix."""
    return f"{topic_prefix}@{bootstrap_servers}"


@dataclass(frozen=True, order=True, slots=True)
class BundleName:
    """Name of a bundle's folder, `<number>-a<attempt>-<source>`; sorts in rollout order.

    Attributes:
        rollout_id: number of the rollout, or of the policy-loss call.
        attempt: one start of the trainer.
        source: `dp<data-parallel rank>` of a shard, `loss<global rank>` of a policy-loss call.
    """

    rollout_id: int
    attempt: int
    source: str

    def __str__(self) -> str:
        return f"{self.rollout_id}-a{self.attempt}-{self.source}"

    @property
    def rollout(self) -> str:
        """What the bundles of all shards of one rollout have in common; one policy-loss call is alone."""
        return f"{self.rollout_id}-a{self.attempt}-{'dp' if self.source.startswith('dp') else self.source}"

    @staticmethod
    def parse(text: str) -> "BundleName | None":
        """Returns the name, or None where `text` is none."""
        match = _NAME.match(text)
        return BundleName(int(match[1]), int(match[2]), match[3]) if match else None


class SpoolFolder:
    """One spool.

    Raises:
        SpoolError: the folder cannot be made or written.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = path = Path(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            self.token.touch()
            self._identity = self._look_at_token()
        except OSError as exc:
            raise SpoolError(
                f"spool folder {path} cannot be used ({exc.strerror}); give a writable local folder as spool_dir"
            ) from exc

    @property
    def pool(self) -> TensorPool:
        """Emptied tensor files of this spool."""
        return TensorPool(self.path / _POOL)

    @property
    def token(self) -> Path:
        """File whose inode tells one folder from another."""
        return self.path / ".host-token"

    def is_intact(self) -> bool:
        """Tells whether the folder is still the one that it was when this object was made."""
        with contextlib.suppress(OSError):
            return self._look_at_token() == self._identity
        return False

    def _look_at_token(self) -> tuple[int, int]:
        status = self.token.stat()
        return status.st_dev, status.st_ino

    def run_folder(self, run_id: str) -> Path:
        """Returns the folder of a run's bundles."""
        return self.path / file_name_for(run_id)

    def committed(self, run_id: str, name: BundleName) -> Path:
        """Returns where a bundle stands once it is committed."""
        return self.run_folder(run_id) / str(name)

    def filling(self, run_id: str, name: BundleName) -> Path:
        """Returns where a bundle is filled."""
        return self.run_folder(run_id) / f".{name}{_FILLING}"

    def rollout_key(self, run_id: str, name: BundleName) -> str:
        """Returns what tells a rollout of a run, or one policy-loss call, from all others in the spool."""
        return f"{file_name_for(run_id)}/{name.rollout}"

    def marking(self, run_id: str, name: BundleName) -> Path:
        """Returns where the mark of a dropped rollout is made; not where peers may still be giving up the bundle."""
        return self.run_folder(run_id) / f".{name}{_MARKING}"

    def set_destination(self, run_id: str, destination: str) -> None:
        """Notes where the bundles of a run are to go; the latest start of the run decides."""
        folder = self.run_folder(run_id)
        folder.mkdir(exist_ok=True)
        temporary = folder / f".destination-{os.getpid()}"
        temporary.write_text(destination)
        temporary.rename(folder / _DESTINATION)

    def keep_destination(self, run_id: str, destination: str) -> None:
        """Notes the destination of a run where there is none: its folder was removed by hand and is made anew."""
        if not (self.run_folder(run_id) / _DESTINATION).exists():
            self.set_destination(run_id, destination)

    def is_used(self) -> bool:
        """Tells whether a publisher has ever used this folder as its spool; a shipper leaves no sign that counts."""
        return (self.path / _POOL).is_dir() or any(self.path.glob(f"*/{_DESTINATION}"))

    def foreign_names(self) -> list[str]:
        """Returns the names of what is in a folder that no publisher has used yet, in order."""
        return sorted(name for name in os.listdir(self.path) if not name.startswith(".") and name != _LOST_AND_FOUND)

    def bundles(self, destination: str | None = None) -> list[tuple[BundleName, Path]]:
        """Returns the committed bundles in rollout order, of all runs or of those with a destination."""
        found: list[tuple[BundleName, Path]] = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path) as entries:
            for run in entries:
                # Asked of the path: a link that leads nowhere is no folder for it, and an error for the entry.
                if run.name.startswith(".") or not (folder := Path(run.path)).is_dir():
                    continue
                if destination is None or _noted_destination(folder) == destination:
                    found += _bundles_in(folder)
        return sorted(found)

    def bundles_of(self, run_id: str) -> list[tuple[BundleName, Path]]:
        """Returns the committed bundles of one run, in rollout order."""
        return sorted(_bundles_in(self.run_folder(run_id)))

    def sweep_unfinished(self, run_id: str, attempt: int) -> list[str]:
        """Removes what dead trainers left half-filled: earlier attempts of the run, and any where no trainer lives.

        Where none lives their counters go too. Returns the bundles that never became whole, as `run/name`.
        """
        swept = []
        alone = lock(self.path / ".trainers.lock")
        try:
            for stats in self.path.glob(".stats-*") if alone is not None else ():
                stats.unlink(missing_ok=True)
            for pattern in (f"*/.*{_FILLING}", f"*/.*{_MARKING}"):
                for entry in self.path.glob(pattern):
                    name = BundleName.parse(entry.name.removeprefix(".").removesuffix(entry.suffix))
                    earlier = name is not None and name.attempt < attempt and entry.parent.name == file_name_for(run_id)
                    if alone is not None or earlier:
                        shutil.rmtree(entry, ignore_errors=True)
                        if entry.suffix == _FILLING:
                            swept.append(f"{entry.parent.name}/{entry.stem.removeprefix('.')}")
        finally:
            if alone is not None:
                alone.close()
        return sorted(swept)

    def retire(self, bundle: Path) -> None:
        """Removes a delivered bundle; its tensor file goes to the pool."""
        # Renamed first: a bundle that lacks its tensor file must not be seen.
        leaving = bundle.with_name(f".{bundle.name}{_LEAVING}")
        bundle.rename(leaving)
        # What the pool does not take goes with the rest.
        with contextlib.suppress(OSError):
            self.pool.give(leaving / TENSORS_NAME)
        # What is left of it somebody sweeps: it is gone for all others, so a failure here must not look like one above.
        shutil.rmtree(leaving, ignore_errors=True)

    def sweep_leaving(self) -> None:
        """Removes what a shipper that died in `retire` has left; for the one that owns the spool."""
        for leaving in self.path.glob(f"*/.*{_LEAVING}"):
            shutil.rmtree(leaving, ignore_errors=True)

    def set_aside(self, bundle: Path, reason: str) -> Path:
        """Moves a bundle that cannot be shipped out of the way, with the reason in `reason.txt`."""
        target = self.path / ".poison" / bundle.parent.name / bundle.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        bundle.rename(target)
        (target / "reason.txt").write_text(reason + "\n")
        return target

    def poisoned(self, run_id: str) -> list[BundleName]:
        """Returns the bundles of a run that were set aside."""
        entries = (self.path / ".poison" / file_name_for(run_id)).glob("*")
        return [name for entry in entries if (name := BundleName.parse(entry.name)) is not None]

    def try_own(self, destination: str | None) -> IO[bytes] | None:
        """Becomes the shipper for a destination, or for all: returns the lock file to keep, None where there is one."""
        return lock(self._shipper_lock(destination))

    def has_shipper(self, destination: str) -> bool:
        """Tells whether a shipper takes care of a destination."""
        return any(is_held(self._shipper_lock(which)) for which in (destination, None))

    def _shipper_lock(self, destination: str | None) -> Path:
        suffix = "" if destination is None else f"-{hashlib.sha256(destination.encode()).hexdigest()[:16]}"
        return self.path / f".shipper{suffix}.lock"

    def register_trainer(self) -> IO[bytes]:
        """Marks this process as a live writer for as long as the returned file is open.

        Raises:
            SpoolError: another process holds the lock and does not let go of it.
        """
        # A shipper or a starting trainer takes it exclusively, for an instant, to look whether anybody is there.
        path = self.path / ".trainers.lock"
        held = lock(path, shared=True, wait_s=_LOCK_TIMEOUT_S)
        if held is None:
            raise SpoolError(f"another process has held {path} for {_LOCK_TIMEOUT_S:g} s; is it stopped?")
        return held

    def has_trainers(self) -> bool:
        """Tells whether a writer of this spool is alive."""
        return is_held(self.path / ".trainers.lock")


def is_folder(path: Path) -> bool:
    """Tells whether a folder is there; False also where that cannot be found out."""
    # Not Path.is_dir, which raises where a folder above may not be looked into.
    return os.path.isdir(path)  # noqa: PTH112


def _bundles_in(run: Path) -> list[tuple[BundleName, Path]]:
    with contextlib.suppress(FileNotFoundError):
        return [(name, entry) for entry in run.iterdir() if (name := BundleName.parse(entry.name)) is not None]
    return []


def _noted_destination(run: Path) -> str | None:
    # Whatever else stands there is no destination of ours.
    with contextlib.suppress(OSError):
        return (run / _DESTINATION).read_text(errors="replace")
    return None
