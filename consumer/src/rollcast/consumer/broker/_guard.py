"""Ends a broker's JVM when the process that started it is gone. Run as a script, never imported.

The kernel's own parent death signal is not enough: it fires when the starting *thread* ends, so a broker
started in a worker thread would die with it. An inherited pipe is not enough either: a forked child of the
starter keeps it open. So this small process waits on the process descriptors of both. It has a session of
its own; a SIGKILL to the starter's process group does not reach it.

Arguments: the starter's process id, the JVM's, and a folder to remove after the JVM, or nothing.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys


def main(starter_pid: int, jvm_pid: int, folder: str) -> None:
    """Returns when the JVM has ended, by itself or because the starter is gone."""
    try:
        jvm = os.pidfd_open(jvm_pid)
    except ProcessLookupError:  # it ended while this process was starting
        return
    watched = select.poll()
    watched.register(jvm, select.POLLIN)
    try:
        starter = os.pidfd_open(starter_pid)
    except ProcessLookupError:
        starter = None
    # A starter that ended before its descriptor was taken may have left its number to somebody else.
    if starter is not None and os.getppid() == starter_pid:
        watched.register(starter, select.POLLIN)
        if any(descriptor == jvm for descriptor, _ in watched.poll()):
            return
        watched.unregister(starter)
    signal.pidfd_send_signal(jvm, signal.SIGKILL)
    watched.poll()
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
