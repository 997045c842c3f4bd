"""Whether dumps are what their manifests say."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollcast.consumer.dump_file import check_against, described_in, load_dump, samples_of
from rollcast.consumer.errors import DumpFileError, NoDumpError, ShutFileError
from rollcast.consumer.store.aside import unknown_digest
from rollcast.consumer.store.files import file_sha256
from rollcast.consumer.store.manifest import Manifest
from rollcast.consumer.store.reading import parse_manifest, tombstone_path, usable
from rollcast.consumer.template import DUMP_SUFFIX, MANIFEST_SUFFIX
from rollcast.schemas import TRAIN_STREAM
from rollcast.schemas.sizes import counted


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of one dump.

    Attributes:
        path: of its file; of its manifest, if it has several.
        manifest: that it was checked against, or that the retention has left of it; None without a usable one.
        problem: why it is not sound; None if it is.
        unknown: whether it is no dump, but a file that stood in the way of one and was kept aside.
        foreign: whether the problem is only that it is something else than a dump, of which no manifest tells.
        shut: whether the problem is only that this user may not read it.
        has_bad_manifest: whether there is a manifest that cannot be used, so that it came by way of Kafka.
    """

    path: Path
    manifest: Manifest | None
    problem: str | None = None
    unknown: bool = False
    foreign: bool = False
    shut: bool = False
    has_bad_manifest: bool = False

    def __str__(self) -> str:
        """Names the path and the problem, each once."""
        problem = self.problem or "sound"
        return problem if problem.startswith(f"{self.path} ") else f"{self.path}: {problem}"


def is_folder(path: Path) -> bool:
    """Returns whether a folder has this name, as far as this user can tell."""
    # Not Path.is_dir, which raises where a folder above may not be looked into.
    return os.path.isdir(path)  # noqa: PTH112


def verify(path: Path) -> Iterator[Verdict]:
    """Yields a verdict on each dump: of this file, of this manifest, or on all below this folder.

    A dump is sound if every file has the size and SHA-256 of its manifest, loads without running code, and holds the
    rollout and the numbers of samples and shards that the manifest tells. A file that no manifest describes is not,
    unless the store has kept it aside under the name of its digest, and it still has that; what can be told of one is
    whether it loads, and whether it is something else than a dump. Nothing is changed.
    """
    if is_folder(path):
        yield from _verify_below(path)
    elif path.name.endswith(MANIFEST_SUFFIX):
        yield _verify_manifest(path)
    else:
        yield _verify_file(path)


def _verify_below(folder: Path) -> Iterator[Verdict]:
    problems: list[OSError] = []
    paths = sorted(_paths_below(folder, problems))
    for problem in problems:
        yield _unreadable(Path(problem.filename), "it cannot be looked into", problem)
    described: set[Path] = set()
    for path in paths:
        if path.name.endswith(MANIFEST_SUFFIX):
            verdict = _verify_manifest(path)
            # A dump whose manifest is bad is told with it, not once more.
            names = [path.name.removesuffix(MANIFEST_SUFFIX)]
            if verdict.manifest is not None:
                names = [file.name for file in verdict.manifest.files]
            described |= {path.with_name(name) for name in names}
            yield verdict
    for path in paths:
        if path.name.endswith(DUMP_SUFFIX) and path not in described:
            yield _verify_undescribed(path)


def _paths_below(folder: Path, problems: list[OSError]) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder, onerror=problems.append):
        yield from (Path(parent, name) for name in (*folders, *files))


def _verify_manifest(path: Path) -> Verdict:
    try:
        manifest = parse_manifest(path)
    except DumpFileError as exc:
        return Verdict(path, None, str(exc), has_bad_manifest=True)
    except OSError as exc:
        return _unreadable(path, "it cannot be read", exc)
    return _verdict(path, manifest) if manifest is not None else Verdict(path, None, "it is not there")


def _verify_file(path: Path) -> Verdict:
    try:
        described = described_in(path) if path.exists() else None
    except DumpFileError as exc:
        return Verdict(path, None, f"its manifest cannot be used: {exc}", has_bad_manifest=True)
    except OSError as exc:
        return _unreadable(path, "it or its manifest cannot be read", exc)
    if described is not None:
        return _verdict(path, described[0])
    return _verify_undescribed(path)


def _verify_undescribed(path: Path) -> Verdict:
    if is_folder(path):
        return Verdict(path, None, "it is a folder where a dump should be; move it away")
    tombstone = tombstone_path(path)
    try:
        if (removed := usable(tombstone)) is not None:
            problem = f"the retention has removed it, as {tombstone.name} says; what is left goes at the daemon's start"
            return Verdict(path, removed, problem)
        if not path.exists():
            return Verdict(path, None, "it is not there")
        if (told := unknown_digest(path.name)) is None:
            return _verify_without_manifest(path)
        digest = file_sha256(path)
    except OSError as exc:
        return _unreadable(path, "it cannot be read", exc)
    if not digest.startswith(told):
        return Verdict(path, None, f"its SHA-256 is {digest}: it was changed after it was kept aside")
    return Verdict(path, None, unknown=True)


def _verify_without_manifest(path: Path) -> Verdict:
    try:
        samples = len(samples_of(load_dump(path)))
    except DumpFileError as exc:
        shut, foreign = isinstance(exc, ShutFileError), isinstance(exc, NoDumpError)
        return Verdict(path, None, f"{exc}; no manifest describes it", shut=shut, foreign=foreign)
    return Verdict(
        path,
        None,
        f"no manifest describes it, as none does what a trainer writes inline; it loads, with "
        f"{counted(samples, 'sample')}, but nothing tells whether they are the right ones",
    )


def _verdict(beside: Path, manifest: Manifest) -> Verdict:
    several = len(manifest.files) != 1
    path = beside if several else beside.with_name(manifest.files[0].name)
    try:
        _check(beside, manifest)
    except DumpFileError as exc:
        return Verdict(path, manifest, str(exc), shut=isinstance(exc, ShutFileError))
    return Verdict(path, manifest)


def _unreadable(path: Path, problem: str, error: OSError) -> Verdict:
    return Verdict(path, None, f"{problem}: {error.strerror or error}", shut=isinstance(error, PermissionError))


def _check(beside: Path, manifest: Manifest) -> None:
    samples = shards = 0
    shut: ShutFileError | None = None
    for file in manifest.files:
        path = beside.with_name(file.name)
        try:
            check_against(path, file)
        except ShutFileError as exc:
            # Another one may be known to be bad.
            shut = shut or exc
            continue
        payload = load_dump(path)
        number = payload.get("rollout_id", payload.get("call"))
        if number != manifest.id.rollout_id:
            raise DumpFileError(f"{path} is of rollout {number}, its manifest of rollout {manifest.id.rollout_id}")
        samples += len(samples_of(payload))
        shards += len(payload["dp_shards"]) if isinstance(payload.get("dp_shards"), list) else 1
    if shut is not None:
        raise shut
    if samples != manifest.samples:
        raise DumpFileError(f"it has {counted(samples, 'sample')}, its manifest tells of {manifest.samples}")
    if shards != manifest.shards and manifest.id.stream == TRAIN_STREAM:
        raise DumpFileError(f"it has {counted(shards, 'shard')}, its manifest tells of {manifest.shards}")
