"""The consumer daemon as a process of its own, the way a user runs it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollcast_demo.errors import ProcessFailedError

# Longer than the daemon's own bound on a graceful stop.
_STOP_GRACE_S = 40.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Daemon:
    """A running `rollcast consume`.

    Attributes:
        process: Its process.
        log_path: Its log.
    """

    process: subprocess.Popen[bytes]
    log_path: Path

    def check(self) -> None:
        """Raise when it is not running any more.

        Raises:
            ProcessFailedError: It has ended, with whatever status.
        """
        status = self.process.poll()
        if status is not None:
            raise ProcessFailedError(name="the daemon", exit_status=status, log_path=self.log_path)


@contextlib.contextmanager
def running_daemon(
    *, bootstrap_servers: str, topic_prefix: str, dump_template: str, log_path: Path
) -> Iterator[Daemon]:
    """Run the daemon for the time of the `with` block.

    Args:
        bootstrap_servers: Kafka addresses.
        topic_prefix: First part of the topic names; the consumer group has the same name.
        dump_template: Where the dumps go, with `{run_id}` and `{rollout_id}`.
        log_path: File for everything it prints.

    Raises:
        ProcessFailedError: It did not end well when it was asked to stop.
    """
    command = [sys.executable, "-m", "rollcast.consumer.cli", "consume"]
    command += ["--bootstrap", bootstrap_servers, "--dump-path", dump_template]
    command += ["--topic-prefix", topic_prefix, "--group", topic_prefix]
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        # A session of its own: Ctrl-C reaches the demo alone, which stops the daemon when its turn comes.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield Daemon(process=process, log_path=log_path)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise ProcessFailedError(name="the daemon", exit_status=process.returncode, log_path=log_path)
