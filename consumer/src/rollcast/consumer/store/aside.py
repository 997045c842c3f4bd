"""What stood under a name before another file gets it, kept under a second name."""

import errno
import logging
import os
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rollcast.consumer.store.files import file_sha256, write_durably
from rollcast.consumer.store.manifest import Manifest, manifest_path
from rollcast.consumer.template import PathTemplate

_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
_DIGEST_CHARS = 16
_UNKNOWN = re.compile(r"\.unknown-([0-9a-f]{16})(\.[^.]*)?\Z")

_log = logging.getLogger("rollcast.consumer")


def keep_aside(template: PathTemplate, base: Path, manifest: Manifest) -> None:
    """Gives the files of a dump a second name, `<stem>.attempt-N`, with a manifest; it may be repeated after a crash.

    Readers of the files, and the files themselves, notice nothing.
    """
    word = f"attempt-{manifest.id.attempt}"
    files = []
    for file in manifest.files:
        path = base.with_name(file.name)
        aside = template.beside(path, word)
        _link(path, aside)
        files.append(replace(file, name=aside.name))
    text = replace(manifest, files=tuple(files)).to_json().encode()
    write_durably(manifest_path(template.beside(base, word)), lambda file: file.write(text))
    _log.info("a newer attempt takes the name of %s; what it had stays as %s", base, template.beside(base, word).name)


def keep_unknown(template: PathTemplate, path: Path, sha256: str) -> None:
    """Keeps a file that no manifest describes as `<stem>.unknown-<digest>`, unless its content is about to come again.

    A crash before the manifest leaves a dump without one, which is the same as the one that is written next; anything
    else is somebody else's file.
    """
    if not path.exists() or path.stat().st_nlink > 1:
        # A second name is that of `keep_aside`, before a crash.
        return
    digest = file_sha256(path)
    if digest != sha256:
        aside = template.beside(path, f"unknown-{digest[:_DIGEST_CHARS]}")
        _log.warning("%s is kept as %s: its content is not that of the dump that gets its name", path, aside.name)
        _link(path, aside)


def unknown_digest(name: str) -> str | None:
    """Returns the beginning of the SHA-256 that `keep_unknown` has put into the name of a file; None without one."""
    match = _UNKNOWN.search(name)
    return match[1] if match else None


def _link(path: Path, aside: Path) -> None:
    try:
        os.link(path, aside)
    except (FileExistsError, FileNotFoundError):
        # A crash came between this step and the new manifest: what is aside already is the right one.
        return
    except OSError as exc:
        if exc.errno not in _NO_HARD_LINKS:
            raise
        with suppress(FileNotFoundError):
            path.rename(aside)
