"""A member that was paused beyond its session can neither damage what its successor published nor undo its commits."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fixtures.frames import frames_of
from fixtures.installation import PART_BYTES, Installation, keyed, running, shards, until, until_it_is_so


@asynccontextmanager
async def daemon_process(installed: Installation, release: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A daemon of the same group that says when it writes, and waits for `release` then."""
    config = installed.config
    settings = {
        name: getattr(config, name)
        for name in ("bootstrap_servers", "dump_path", "group_id", "partitions", "session_timeout_ms")
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fixtures.store_programs"),
        *(json.dumps({**settings, "topics": config.topics.prefix}), str(release)),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def line_of(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    line = await process.stdout.readline()
    assert line, "the daemon ended"
    return line.decode().strip()


@pytest.mark.timeout(180)
async def test_a_member_paused_in_a_write_harms_neither_the_dump_nor_the_offsets_of_its_successor(
    installed: Installation, tmp_path: Path
) -> None:
    one, two = (
        keyed("run", rollout_id, frames_of("run", 1, rollout_id, shards(rollout_id), max_part_bytes=PART_BYTES))
        for rollout_id in (1, 2)
    )
    newer = keyed("run", 1, frames_of("run", 2, 1, shards(3), max_part_bytes=PART_BYTES))
    release = tmp_path / "release"

    async def all_committed() -> bool:
        return sum((await installed.committed()).values()) == len(one + newer + two)

    async with daemon_process(installed, release) as paused:
        await installed.send(one)
        assert await line_of(paused) == "writing"
        paused.send_signal(signal.SIGSTOP)
        async with running(installed.config) as successor:
            # Only when the session of the paused one has run out does the group give its partitions away.
            await until(lambda: successor.stats.dumps == 1, timeout_s=60)
            await installed.send(newer + two)
            await until(lambda: successor.stats.dumps == 3)
            await until_it_is_so(all_committed)
            before, offsets = installed.digests(), await installed.committed()
            release.touch()
            paused.send_signal(signal.SIGCONT)
            assert await line_of(paused) == "attempt 2 is there"
            paused.send_signal(signal.SIGTERM)
            async with asyncio.timeout(40):
                assert await paused.wait() == 0
            assert {name: digest for name, digest in installed.digests().items() if name != "release"} == before
            assert await installed.committed() == offsets
            await installed.send(keyed("run", 4, frames_of("run", 1, 4, shards(4))))
            await until(lambda: (installed.folder / "run" / "4.pt.manifest.json").exists())

    installed.check("run", 1, shards(3))
    for rollout_id in (2, 4):
        installed.check("run", rollout_id, shards(rollout_id))
