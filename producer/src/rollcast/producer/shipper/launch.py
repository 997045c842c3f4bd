"""Starts the shipper beside the trainer, and starts it again when it dies."""

import logging
import os
import subprocess
import sys
import time

from rollcast.producer.config import PublisherConfig
from rollcast.producer.spool.folder import SpoolFolder

_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 30.0
LOG_NAME = "shipper.log"

# A shipper outlives the publisher that started it, and Popen warns when a running process is forgotten.
_started: list[subprocess.Popen[bytes]] = []

_log = logging.getLogger("rollcast.producer")


class ShipperLauncher:
    """Keeps one shipper on a spool; several writers of a host may tend the same one."""

    def __init__(self, spool: SpoolFolder, config: PublisherConfig) -> None:
        self._spool, self._config = spool, config
        self._process: subprocess.Popen[bytes] | None = None
        self._next_start = 0.0
        self._pause_s = _FIRST_PAUSE_S

    def tend(self) -> None:
        """Starts a shipper where none owns the spool; with growing pauses where it keeps dying."""
        running = self._process is not None and self._process.poll() is None
        if running or time.monotonic() < self._next_start or self._spool.has_shipper():
            return
        self._next_start = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        command = [
            sys.executable,
            "-m",
            "rollcast.producer.shipper.cli",
            f"--spool={self._spool.path}",
            f"--bootstrap={self._config.bootstrap_servers}",
            f"--topic-prefix={self._config.topic_prefix}",
            f"--max-part-bytes={self._config.max_part_bytes}",
            "--stop-with-trainers",
        ]
        try:
            with (self._spool.path / LOG_NAME).open("ab") as log:
                # A session of its own: Ctrl-C in the trainer's terminal must not reach it. No GPU: it needs none.
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                )
                _started.append(self._process)
        except OSError as exc:
            _log.error("rollcast-ship cannot be started (%s); bundles wait in %s", exc, self._spool.path)
