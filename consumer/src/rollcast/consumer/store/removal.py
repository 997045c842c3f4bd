"""Removes dumps by the rule of the retention, and remembers that they were there."""

import logging
from pathlib import Path

from rollcast.consumer.retention import Kept, Retention, what_goes
from rollcast.consumer.rollout import RolloutKey
from rollcast.consumer.store.files import locked, sync_directory
from rollcast.consumer.store.inventory import Inventory
from rollcast.consumer.store.manifest import Manifest, manifest_path
from rollcast.consumer.store.protocol import Dump
from rollcast.consumer.store.reading import tombstone_path, usable
from rollcast.consumer.store.steps import AtStep, Step
from rollcast.consumer.template import TOMBSTONE_SUFFIX, PathTemplate
from rollcast.schemas import TRAIN_STREAM

_log = logging.getLogger("rollcast.consumer")


class Removal:
    """Removes the dumps of a run that a new one makes superfluous.

    The manifest is renamed first and is a tombstone from then on: whoever reads the records again finds that the
    rollout was published, and does not publish it again. Then its files go, those of older attempts included. What a
    crash leaves in between, `finish` removes.

    Args:
        template: names the dumps.
        retention: the rule.
        at_step: called after each step.
    """

    def __init__(self, template: PathTemplate, retention: Retention, at_step: AtStep) -> None:
        self._template, self._retention, self._at_step = template, retention, at_step
        self._inventory = Inventory(template)

    def plan(self, dump: Dump, size: int) -> list[Kept]:
        """Returns what goes once this dump, whose new files have this size, is published.

        Raises:
            QuotaError: there is no room for it.
        """
        rollout = dump.rollout.id
        if dump.missing or rollout.stream != TRAIN_STREAM or not self._retention.removes:
            return []
        kept = self._inventory.of_run(rollout.run_id)
        older = kept.pop(rollout.rollout_id, None)
        newest = Kept(rollout.rollout_id, rollout.attempt, size + (older.size if older is not None else 0))
        return what_goes(self._retention, kept.values(), newest)

    def remove(self, run_id: str, goes: list[Kept]) -> None:
        """Removes these dumps; one that cannot be removed now is tried again after the next one."""
        for kept in goes:
            key = RolloutKey(run_id, kept.rollout_id)
            try:
                for base in self._template.bases(key):
                    with locked(base.parent):
                        self._retire(base, kept)
            except OSError as exc:
                _log.warning("rollout %d of run %r could not be removed now: %s", kept.rollout_id, run_id, exc)
            else:
                _log.info("rollout %d of run %r is removed, as the retention says", kept.rollout_id, run_id)

    def finish(self, directory: Path) -> None:
        """Removes what a crash has left of removed dumps; the caller holds the folder's lock."""
        for tombstone in directory.glob(f"*{TOMBSTONE_SUFFIX}"):
            base = tombstone.with_name(tombstone.name.removesuffix(TOMBSTONE_SUFFIX))
            if manifest_path(base).exists():
                tombstone.unlink()
            elif (manifest := usable(tombstone)) is not None:
                self._remove_files(base, manifest)

    def _retire(self, base: Path, kept: Kept) -> None:
        manifest = usable(manifest_path(base))
        if manifest is None or manifest.id.attempt > kept.attempt or self._template.base(manifest.id) != base:
            return
        manifest_path(base).replace(tombstone_path(base))
        sync_directory(base.parent)
        self._at_step(Step.RETIRED)
        self._remove_files(base, manifest)
        self._at_step(Step.REMOVED)

    def _remove_files(self, base: Path, manifest: Manifest) -> None:
        for aside in self._template.asides(base):
            older = usable(manifest_path(aside))
            if older is not None and older.id.key == manifest.id.key:
                remove_files(aside, older)
                manifest_path(aside).unlink(missing_ok=True)
        remove_files(base, manifest)
        sync_directory(base.parent)


def remove_files(base: Path, manifest: Manifest) -> None:
    """Removes the files that a manifest describes, but not itself."""
    for file in manifest.files:
        base.with_name(file.name).unlink(missing_ok=True)
