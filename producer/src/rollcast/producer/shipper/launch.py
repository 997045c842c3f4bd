"""Starts the shipper beside the trainer, and starts it again when it dies."""

import logging
import os
import sys
import time

from rollcast.producer.config import PublisherConfig
from rollcast.producer.spool.folder import SpoolFolder

_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 60.0
_TELL_EVERY_S = 60.0
_LAST_BYTES = 4096
LOG_NAME = "shipper.log"

_log = logging.getLogger("rollcast.producer")


class ShipperLauncher:
    """Keeps one shipper on a spool; several writers of a host may tend the same one."""

    def __init__(self, spool: SpoolFolder, config: PublisherConfig) -> None:
        self._spool, self._config = spool, config
        self._pid: int | None = None
        self._next_start = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self._started_at = 0.0
        self._told, self._told_at = "", 0.0

    def tend(self) -> None:
        """Starts a shipper where none owns the spool; with growing pauses where it keeps dying."""
        if (
            self._is_running()
            or time.monotonic() < self._next_start
            or self._spool.has_shipper(self._config.destination)
        ):
            return
        self._next_start = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        # The option changes nothing; it is where somebody who looks for `rollcast-ship` among the processes finds it.
        # Not the name of the program, by which Python finds its own packages.
        command = [
            sys.executable,
            "-X",
            "rollcast-ship",
            "-m",
            "rollcast.producer.shipper.cli",
            f"--spool={self._spool.path}",
            f"--bootstrap={self._config.bootstrap_servers}",
            f"--topic-prefix={self._config.topic_prefix}",
            f"--max-part-bytes={self._config.max_part_bytes}",
            "--only-matching-runs",
            "--stop-with-trainers",
        ]
        self._started_at = time.monotonic()
        log = str(self._spool.path / LOG_NAME)
        try:
            # Not subprocess.Popen, which expects to outlive its process. A session of its own: Ctrl-C in the trainer's
            # terminal must not reach it. No GPU: it needs none.
            self._pid = os.posix_spawn(
                sys.executable,
                command,
                {**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                ],
                setsid=True,
            )
        except OSError as exc:
            _log.error("rollcast-ship cannot be started (%s); bundles wait in %s", exc, self._spool.path)

    def _is_running(self) -> bool:
        if self._pid is None:
            return False
        try:
            ended, status = os.waitpid(self._pid, os.WNOHANG)
        except ChildProcessError:
            # Somebody else has reaped it; how it ended is unknown.
            ended, status = self._pid, 0
        if ended:
            self._pid = None
            self._report(os.waitstatus_to_exitcode(status))
        return not ended

    def last_words(self) -> str:
        """Returns the last line of the shipper's log."""
        try:
            with (self._spool.path / LOG_NAME).open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_BYTES))
                lines = log.read().decode(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1][:500] if lines else "nothing"

    def _report(self, status: int) -> None:
        words, now = self.last_words(), time.monotonic()
        if status and (words != self._told or now - self._told_at > _TELL_EVERY_S):
            _log.error("rollcast-ship ended with status %d: %s", status, words)
            self._told, self._told_at = words, now
        if now - self._started_at > _MAX_PAUSE_S:
            self._pause_s = _FIRST_PAUSE_S
