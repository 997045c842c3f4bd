"""Dumps as files in local folders."""

import errno
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rollcast.consumer.config import ConsumeConfig, Layout, fixed_directory
from rollcast.consumer.metrics import Metric
from rollcast.consumer.retention import Retention
from rollcast.consumer.rollout import RolloutId, RolloutKey
from rollcast.consumer.store.aside import keep_aside, keep_unknown
from rollcast.consumer.store.describing import manifest_of, worth_of
from rollcast.consumer.store.files import (
    HashingWriter,
    locked,
    make_directory,
    sweep,
    sync_directory,
    sync_file,
    temporary_beside,
    write_durably,
)
from rollcast.consumer.store.manifest import Manifest, ManifestFile, manifest_path
from rollcast.consumer.store.protocol import Dump, PublishedDump
from rollcast.consumer.store.reading import kept_at, published_as, tombstone_path, usable
from rollcast.consumer.store.removal import Removal, remove_files
from rollcast.consumer.store.saving import save
from rollcast.consumer.store.steps import AtStep, Step, nothing
from rollcast.consumer.template import MANIFEST_SUFFIX, TOMBSTONE_SUFFIX, PathTemplate

_INCOMPLETE = "incomplete"
_INCOMPLETE_MANIFESTS = f"*.{_INCOMPLETE}*{MANIFEST_SUFFIX}"
_KEEPS_ALL = Retention()

_log = logging.getLogger("rollcast.consumer")


class LocalDumpStore:
    """Keeps each dump as one or several files with a sidecar manifest, which is written last and is the commit.

    A file gets its name by the rename of a whole, synced file; when all have theirs, the manifest gets its own in the
    same way. Before a name is given to another file, the manifest that describes it is removed. So a manifest never
    describes another file than the one that is there; after a crash in between there is none, `published` does not
    report the dump, and the next run writes it again.

    When a newer attempt replaces a dump, the older one stays as `<stem>.attempt-N.pt` with its manifest; where the
    names have the attempt, nothing needs to be replaced. A file that no manifest describes is never overwritten by
    another content: it stays as `<stem>.unknown-<digest>.pt`. An incomplete dump is `<stem>.incomplete.pt` and goes
    when the complete one has come.

    What is there is judged under a lock of the folder, after the new files are whole: a daemon that was paused in a
    write finds what another one has published meanwhile, and leaves it.

    Args:
        template: path with `{run_id}` and `{rollout_id}`, and perhaps `{rank}` and `{attempt}`.
        several_files: whether a train dump is a file for each rank.
        retention: which dumps are removed after a new one has come.
        at_step: called after each step, for tests.

    Raises:
        TemplateError: dumps could meet under one name.
    """

    def __init__(
        self,
        template: str,
        *,
        several_files: bool = False,
        retention: Retention = _KEEPS_ALL,
        at_step: AtStep = nothing,
    ) -> None:
        self._template = PathTemplate(template, several_files=several_files)
        self._removal = Removal(self._template, retention, at_step)
        self._at_step = at_step

    @classmethod
    def of(cls, config: ConsumeConfig) -> "LocalDumpStore":
        """Returns the store of these settings."""
        several_files = config.layout is Layout.MILES
        return cls(config.dump_path, several_files=several_files, retention=config.retention)

    def open(self) -> None:
        """Makes the folder that does not depend on the run, and finishes what dead writers left."""
        fixed = fixed_directory(self._template.template)
        make_directory(fixed)
        if not os.access(fixed, os.W_OK | os.X_OK):
            raise PermissionError(f"{fixed} is not writable")
        for directory in self._template.directories():
            for path in sweep(directory):
                _log.info("removed %s, left by a writer that died", path)
            if any(directory.glob(f"*{TOMBSTONE_SUFFIX}")) or any(directory.glob(_INCOMPLETE_MANIFESTS)):
                with locked(directory):
                    self._removal.finish(directory)
                    self._tidy(directory)

    def published(self, key: RolloutKey) -> PublishedDump | None:
        """Returns the complete dump of this rollout, if it is there with its manifest, or was removed on purpose."""
        found = [kept for base in self._template.bases(key) if (kept := self._complete_at(base)) is not None]
        return max(found, key=lambda kept: kept.manifest.id.attempt, default=None)

    def publish(self, dump: Dump) -> PublishedDump:
        """Writes the dump and its manifest; the same or a higher attempt that is there already is left as it is."""
        if (better := self._better(dump)) is not None:
            return better
        base = self._named(self._template.base(dump.rollout.id), dump)
        make_directory(base.parent)
        with ExitStack() as stack:
            written = [stack.enter_context(self._written(dump, index)) for index in range(len(dump.files))]
            self._at_step(Step.WRITTEN)
            # Not under the lock, which other daemons wait for.
            metrics = dump.measuring.result() if dump.measuring is not None else ()
            with locked(base.parent):
                if (better := self._better(dump)) is not None:
                    return better
                goes = self._removal.plan(dump, sum(each.entry.size for each in written))
                published = self._replace(base, dump, written, metrics)
        self._removal.remove(dump.rollout.id.run_id, goes)
        return published

    def known(self, key: RolloutKey) -> Manifest | None:
        """Returns the manifest of the complete dump of the highest attempt, whether or not its files are there."""
        manifests = [usable(manifest_path(base)) or usable(tombstone_path(base)) for base in self._template.bases(key)]
        known = [each for each in manifests if each is not None and each.complete and each.id.key == key]
        return max(known, key=lambda manifest: manifest.id.attempt, default=None)

    def withdraw(self, rollout: RolloutId) -> None:
        """Forgets that this attempt was published, so that it can be published again; its files stay."""
        base = self._template.base(rollout)
        with locked(base.parent):
            manifest_path(base).unlink(missing_ok=True)
            tombstone_path(base).unlink(missing_ok=True)
            sync_directory(base.parent)

    def _named(self, path: Path, dump: Dump) -> Path:
        return self._template.beside(path, _INCOMPLETE) if dump.missing else path

    def _complete_at(self, base: Path) -> PublishedDump | None:
        kept = kept_at(base)
        # The manifest of another rollout or attempt can stand here if the template was changed.
        is_it = kept is not None and kept.manifest.complete and self._template.base(kept.manifest.id) == base
        return kept if is_it else None

    def _better(self, dump: Dump) -> PublishedDump | None:
        """Returns what is kept and must not be replaced by this dump."""
        rollout = dump.rollout.id
        existing = self.published(rollout.key)
        if existing is not None and existing.manifest.id.attempt >= rollout.attempt:
            return existing
        if not dump.missing:
            return None
        earlier = kept_at(self._named(self._template.base(rollout), dump))
        if earlier is None:
            return None
        there = earlier.manifest
        better_or_equal = (there.id.attempt, there.worth) >= (rollout.attempt, worth_of(dump))
        return earlier if better_or_equal else None

    @contextmanager
    def _written(self, dump: Dump, index: int) -> Iterator["_Written"]:
        """Yields a file of the dump, whole and on the disk, under a temporary name."""
        file = dump.files[index]
        path = self._named(self._template.path(dump.rollout.id, file.rank), dump)
        if path.is_dir():
            # The rename would tell it too, after all of the file was written.
            raise IsADirectoryError(errno.EISDIR, "a folder has the name of the dump", str(path))
        with temporary_beside(path) as (temporary, opened):
            self._at_step(Step.BEGUN)
            with HashingWriter(opened) as writer:
                for share in save(file.content, writer.write):
                    # Not in a thread of its own: both would wait for the interpreter lock at every step.
                    if dump.measuring is not None:
                        dump.measuring.up_to((index + share) / len(dump.files))
            sync_file(opened)
            entry = ManifestFile(name=path.name, rank=file.rank, sha256=writer.sha256(), size=writer.size)
            yield _Written(path=path, temporary=temporary, entry=entry)

    def _replace(
        self, base: Path, dump: Dump, written: Sequence["_Written"], metrics: tuple[Metric, ...]
    ) -> PublishedDump:
        """Gives the written files their names; the caller holds the folder's lock."""
        replaced = usable(manifest_path(base))
        if replaced is not None:
            self._release(base, replaced, dump, {each.path.name for each in written})
        known = replaced or usable(tombstone_path(base))
        described = {file.name for file in known.files} if known is not None else set()
        for each in written:
            if each.path.name not in described:
                keep_unknown(self._template, each.path, each.entry.sha256)
            each.temporary.replace(each.path)
            self._at_step(Step.NAMED)
        sync_directory(base.parent)
        self._at_step(Step.NAMES_SYNCED)
        manifest = manifest_of(dump, tuple(each.entry for each in written), metrics)
        text = manifest.to_json().encode()
        write_durably(manifest_path(base), lambda file: file.write(text))
        self._at_step(Step.PUBLISHED)
        if manifest.complete:
            tombstone_path(base).unlink(missing_ok=True)
            self._remove_incomplete(manifest)
            self._at_step(Step.TIDIED)
        return published_as(base, manifest)

    def _release(self, base: Path, replaced: Manifest, dump: Dump, names: set[str]) -> None:
        """Takes the names from the dump that has them, which stays aside if it is whole and of another attempt."""
        if replaced.complete and replaced.id.attempt != dump.rollout.id.attempt:
            keep_aside(self._template, base, replaced)
            self._at_step(Step.KEPT_ASIDE)
        # Before the manifest, which alone knows the files of ranks that the new dump does not have.
        for file in replaced.files:
            if file.name not in names:
                base.with_name(file.name).unlink(missing_ok=True)
        manifest_path(base).unlink()
        sync_directory(base.parent)
        self._at_step(Step.WITHDRAWN)

    def _remove_incomplete(self, complete: Manifest) -> None:
        """Removes the incomplete dumps of a rollout, of this attempt and lower ones."""
        for base in self._template.bases(complete.id.key, _INCOMPLETE):
            manifest = usable(manifest_path(base))
            if manifest is None or manifest.complete or manifest.id.attempt > complete.id.attempt:
                continue
            remove_files(base, manifest)
            manifest_path(base).unlink(missing_ok=True)

    def _tidy(self, directory: Path) -> None:
        """Removes the incomplete dumps that a crash has left beside their complete ones."""
        for path in directory.glob(_INCOMPLETE_MANIFESTS):
            manifest = usable(path)
            published = self.published(manifest.id.key) if manifest is not None and not manifest.complete else None
            if published is not None:
                self._remove_incomplete(published.manifest)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Written:
    """A file that is on the disk under a temporary name.

    Attributes:
        path: its final name.
        temporary: its name until then.
        entry: what the manifest says of it.
    """

    path: Path
    temporary: Path
    entry: ManifestFile
