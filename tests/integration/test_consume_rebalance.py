"""What a rebalance does to rollouts that are not complete yet."""

from fixtures.frames import frames_of
from fixtures.installation import PART_BYTES, Installation, keyed, running, shards, until
from rollcast.consumer import Daemon

_REBALANCES = 3


async def until_read(count: int, *daemons: Daemon) -> None:
    await until(lambda: sum(daemon.stats.records for daemon in daemons) == count)


async def test_what_was_read_before_a_rebalance_is_read_again_by_whoever_has_it_then(installed: Installation) -> None:
    rollouts = {
        rollout_id: keyed("run", rollout_id, frames_of("run", 1, rollout_id, shards(1), max_part_bytes=PART_BYTES))
        for rollout_id in range(8)
    }
    early = [record for records in rollouts.values() for record in records[:5]]
    late = [record for records in rollouts.values() for record in records[5:]]

    async with running(installed.config) as first:
        await installed.send(early)
        await until_read(len(early), first)
        # Whether records are lost depends on what the client is waiting for when the group comes to it.
        for _ in range(_REBALANCES):
            before = first.stats.records
            async with running(installed.config) as second:
                await until_read(before + len(early), first, second)
                before = first.stats.records
            await until_read(before + len(early), first)
        await installed.send(late)
        announced = await installed.dumps(len(rollouts))

    assert {dump.rollout_id for dump in announced} == rollouts.keys()
    for rollout_id in rollouts:
        installed.check("run", rollout_id, shards(1))
