"""Two daemons, a broker and what can go wrong between them, as a story that its seed tells again."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Final

import pytest

from chaos.faults import Faults, drawn_faults
from chaos.members import Member
from chaos.shipping import Shipper
from chaos.story import Story
from chaos.verdict import Verdict
from rollcast.consumer.broker import JvmBroker
from rollcast.schemas import Topics

pytestmark = pytest.mark.timeout(600)

SEED_VARIABLE: Final = "ROLLCAST_CHAOS_SEED"
PREFIX: Final = "chaos"
# Longer than any silence that faults make, one after the other: what is sent in full must not become incomplete.
INCOMPLETE_AFTER_S: Final = 45.0
BETWEEN_BURSTS_S: Final = 1.5
# For the last rebalance, and for the incomplete rollout to come of age after it.
SETTLE_S: Final = 120.0
LOOK_EVERY_S: Final = 1.0


@pytest.fixture
def seed(report_to_terminal: Callable[[str], None]) -> int:
    """The seed of the story: always the same one, unless the environment names another."""
    value = int(os.environ.get(SEED_VARIABLE, "1"))
    report_to_terminal(f"the seed of the chaos is {value}; {SEED_VARIABLE}={value} tells the same story again")
    return value


async def test_no_dump_is_lost_mixed_or_half_published_whatever_is_killed(
    seed: int, own_broker: JvmBroker, tmp_path: Path
) -> None:
    random = Random(seed)  # noqa: S311 - not for secrets
    story = Story(random)
    report = journal(tmp_path / "story.log")
    report(f"seed {seed}: {story.record_count} records in {len(story.bursts)} bursts")
    verdict = Verdict(
        story,
        folder=tmp_path / "dumps",
        bootstrap_servers=own_broker.bootstrap_servers,
        topics=Topics(PREFIX),
        group_id=PREFIX,
    )
    async with running_members(own_broker.bootstrap_servers, tmp_path, report) as members:
        faults = Faults(
            drawn_faults(random, bursts=len(story.bursts), members=len(members)), own_broker, members, report
        )
        async with Shipper(own_broker.bootstrap_servers, Topics(PREFIX).records, report) as shipper:
            await tell(story, faults, shipper, members)
        report("everything is sent")
        await settle(verdict, members)
        report("everything is settled, or late")
        for member in members:
            await member.stop()
    problems = await verdict.problems()
    assert not problems, f"seed {seed}, logs and dumps in {tmp_path}:\n" + "\n".join(problems)


async def tell(story: Story, faults: Faults, shipper: Shipper, members: Sequence[Member]) -> None:
    """Sends the story; returns when everything is sent and every fault is over."""
    async with asyncio.TaskGroup() as tasks:
        for index, burst in enumerate(story.bursts):
            faults.start(index, tasks)
            await shipper.ship(burst)
            for member in members:
                member.check()
            await asyncio.sleep(BETWEEN_BURSTS_S)


async def settle(verdict: Verdict, members: Sequence[Member]) -> None:
    """Returns when nothing is unfinished any more, or does not become finished."""
    deadline = time.monotonic() + SETTLE_S
    while await verdict.unfinished() and time.monotonic() < deadline:
        for member in members:
            member.check()
        await asyncio.sleep(LOOK_EVERY_S)


@asynccontextmanager
async def running_members(
    bootstrap_servers: str, folder: Path, report: Callable[[str], None]
) -> AsyncIterator[list[Member]]:
    """Yields two started daemons of one group; none of their processes outlives the block."""
    arguments = ["--bootstrap", bootstrap_servers, "--dump-path", f"{folder}/dumps/{{run_id}}/{{rollout_id}}.pt"]
    arguments += ["--topic-prefix", PREFIX, "--group", PREFIX, "--partitions", "4"]
    # A daemon may be started while the broker is away.
    arguments += ["--incomplete-after-s", str(INCOMPLETE_AFTER_S), "--connect-timeout-s", "120"]
    members = [Member(name, arguments, folder / f"{name}.log", report) for name in ("daemon-a", "daemon-b")]
    try:
        for member in members:
            await member.start()
        yield members
    finally:
        for member in members:
            await member.kill()


def journal(path: Path) -> Callable[[str], None]:
    """Returns what writes lines to a file, with the seconds since now."""
    began = time.monotonic()

    def report(line: str) -> None:
        with path.open("a") as file:
            file.write(f"{time.monotonic() - began:7.1f} s  {line}\n")

    return report
