"""The daemons of the chaos test: `rollcast consume` as processes, each started and ended by its own id."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

# Longer than the daemon's own bound on a graceful stop.
_STOP_BOUND_S: Final = 45.0
# With the broker away for a while, and a dead member whose session has to run out.
_JOIN_BOUND_S: Final = 120.0
_JOINED: Final = b"assigned partitions"


class Member:
    """One member of the consumer group. Faults of one member wait for each other; those of several do not.

    Args:
        name: of the member.
        arguments: of `rollcast consume`.
        log_path: gets everything that its processes print.
        report: takes a line for each thing that is done to it.
    """

    def __init__(self, name: str, arguments: Sequence[str], log_path: Path, report: Callable[[str], None]) -> None:
        self.name, self.log_path = name, log_path
        self._arguments, self._report = arguments, report
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._log_begins = 0

    async def start(self) -> None:
        """Starts the process; whether it finds the broker is its own business."""
        with self.log_path.open("ab") as log:
            self._log_begins = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "rollcast.consumer.cli", "consume", *self._arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ,
            )
        self._report(f"{self.name} has started, pid {self._process.pid}")

    async def kill_and_start(self, away_s: float) -> None:
        """Ends the process with SIGKILL, wherever it is, and starts another one after a while."""
        async with self._lock:
            self._report(f"{self.name} is killed, and away for {away_s:.1f} s")
            await self.kill()
            await asyncio.sleep(away_s)
            await self.start()

    async def pause(self, for_s: float) -> None:
        """Stops the process for a while, so that its partitions go to others while it thinks they are its own."""
        async with self._lock:
            await self._joined()
            process = self._alive()
            self._report(f"{self.name} is paused for {for_s:g} s")
            process.send_signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(for_s)
            finally:
                process.send_signal(signal.SIGCONT)
            self._report(f"{self.name} goes on")

    async def restart(self) -> None:
        """Has the process leave the group in order, and starts another one: two rebalances."""
        async with self._lock:
            await self._stop()
            await self.start()

    async def stop(self) -> None:
        """Has the process leave the group in order, after all that is being done to it."""
        async with self._lock:
            await self._stop()

    async def kill(self) -> None:
        """Ends the process at once, if there is one."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    def check(self) -> None:
        """Returns if it runs or is away because of a fault; a daemon has no other reason to end."""
        if self._process is not None:
            self._alive()

    async def _joined(self) -> None:
        """Returns when the process has partitions; before that it has nothing to lose."""
        async with asyncio.timeout(_JOIN_BOUND_S):
            while _JOINED not in self.log_path.read_bytes()[self._log_begins :]:
                self._alive()
                await asyncio.sleep(0.2)

    async def _stop(self) -> None:
        await self._joined()
        process = self._alive()
        self._report(f"{self.name} is asked to stop")
        process.terminate()
        async with asyncio.timeout(_STOP_BOUND_S):
            status = await process.wait()
        self._process = None
        assert status == 0, f"{self.name} stopped with status {status}; its log is {self.log_path}"

    def _alive(self) -> asyncio.subprocess.Process:
        process = self._process
        assert process is not None, f"{self.name} does not run"
        assert process.returncode is None, (
            f"{self.name} ended by itself with status {process.returncode}; its log is {self.log_path}"
        )
        return process
