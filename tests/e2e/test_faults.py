"""Trainers, shippers and the spool between them hurt: every dump equals what the trainer had, or the rollout is known
as dropped.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from fixtures.faults import Pipeline, consuming, pipeline, trainer
from fixtures.installation import Installation, admin_client, installation, until
from fixtures.shipping import large_shard, ship_process
from fixtures.small_disk import small_file_system
from rollcast.consumer.broker import Broker
from rollcast.consumer.topics import prepare_topics

pytestmark = pytest.mark.timeout(200)

_KILLS = 10
_SHARD_BYTES = 64_000_000


@pytest.fixture
async def made(broker: Broker, tmp_path: Path) -> Installation:
    made = installation(broker.bootstrap_servers, tmp_path / "dumps")
    await prepare_topics(made.config)
    return made


@pytest.fixture
async def pipe(made: Installation, tmp_path: Path) -> AsyncIterator[Pipeline]:
    with pipeline(made, tmp_path / "spool") as pipe:
        yield pipe


async def _ship(pipe: Pipeline) -> None:
    with ship_process(*pipe.ship_options, stderr=None) as process:
        assert await asyncio.to_thread(process.wait, 90) == 0


async def test_a_shipper_killed_at_ten_random_moments_loses_nothing(pipe: Pipeline) -> None:
    seed = random.SystemRandom().randrange(2**32)
    moments = random.Random(seed)  # noqa: S311 - not for secrets
    published = 0
    with trainer(pipe, start_shipper=False, shard=large_shard) as training:
        async with consuming(pipe) as daemon:
            for _ in range(_KILLS):
                while len(pipe.bundles) < 3:
                    assert (await training.publish(published))[0] == "published"
                    published += 1
                    await until(lambda: len(pipe.bundles) > 0)
                taken = await pipe.records_reach(0)
                with ship_process(*pipe.ship_options, stderr=None) as process:
                    await pipe.records_reach(taken + moments.randrange(1, 60))
                    assert process.poll() is None
                    process.kill()
                    process.wait()
                assert pipe.bundles, f"seed {seed}: it was done before it was killed"
            training.kill()
            await _ship(pipe)
            await pipe.dumps_are_there(*range(published))
    assert not pipe.bundles
    assert published > 2
    assert daemon.stats.duplicates > 0
    for rollout_id in range(published):
        pipe.check(rollout_id, shard=large_shard)


async def test_a_trainer_starts_another_shipper_when_its_own_is_killed_in_mid_shard(pipe: Pipeline) -> None:
    with trainer(pipe) as training:
        async with consuming(pipe, 0, 1):
            for rollout_id in (0, 1):
                assert (await training.publish(rollout_id))[0] == "published"
            await pipe.records_reach(10)
            (first,) = pipe.shippers()
            first.kill()
            assert pipe.bundles
            assert await training.close()
    for rollout_id in (0, 1):
        pipe.check(rollout_id)


async def test_a_shipper_outlives_its_trainer_and_ends_when_all_is_delivered(pipe: Pipeline) -> None:
    with trainer(pipe) as training:
        async with consuming(pipe, 0, 1):
            for rollout_id in (0, 1):
                assert (await training.publish(rollout_id))[0] == "published"
            await pipe.records_reach(10)
            training.kill()
            assert pipe.bundles
    await until(lambda: not pipe.shippers())
    for rollout_id in (0, 1):
        pipe.check(rollout_id)


@pytest.mark.parametrize("by", ["a new start", "rollcast-ship"])
async def test_what_a_trainer_killed_right_after_the_commit_has_left_is_shipped(pipe: Pipeline, by: str) -> None:
    with trainer(pipe, start_shipper=False, dies="after the commit") as training:
        await training.die_publishing(0)
    assert pipe.bundles
    async with consuming(pipe, 0):
        if by == "rollcast-ship":
            await _ship(pipe)
        else:
            with trainer(pipe) as training:
                assert (await training.publish(1))[0] == "published"
                assert await training.close()
                await pipe.dumps_are_there(1)
            pipe.check(1)
    pipe.check(0)


async def test_what_a_trainer_killed_in_mid_publish_has_left_is_swept_by_the_next_which_publishes_it_anew(
    pipe: Pipeline,
) -> None:
    with trainer(pipe, dies="in mid-publish") as training:
        await training.die_publishing(0)
    assert list(pipe.spool.rglob("*.filling"))
    async with consuming(pipe, 0, 1) as daemon:
        await _ship(pipe)
        assert list(pipe.spool.rglob("*.filling")), "only a trainer of the run knows that nobody fills it any more"
        with trainer(pipe) as training:
            for rollout_id in (0, 1):
                assert (await training.publish(rollout_id))[0] == "published"
            assert not [path for path in pipe.spool.rglob("*.filling") if path.name.startswith(".0-")]
            assert await training.close()
    assert daemon.stats.dumps == 2
    for rollout_id in (0, 1):
        pipe.check(rollout_id)


async def test_a_record_limit_lowered_below_a_part_while_it_is_shipped_only_makes_the_parts_smaller(
    pipe: Pipeline,
) -> None:
    topic = pipe.installation.topics.records
    with trainer(pipe) as training:
        async with consuming(pipe, 0, 1) as daemon, admin_client(pipe.installation.config.bootstrap_servers) as admin:
            for rollout_id in (0, 1):
                assert (await training.publish(rollout_id))[0] == "published"
            await pipe.records_reach(10)
            lowered = ConfigResource(ConfigResourceType.TOPIC, topic, {"max.message.bytes": "100000"})
            await admin.alter_configs([lowered])
            assert pipe.bundles
            assert await training.close()
    assert daemon.stats.records > _SHARD_BYTES / 1.3 / 100_000
    assert not daemon.stats.dead_letters
    for rollout_id in (0, 1):
        pipe.check(rollout_id)


async def test_a_second_trainer_with_the_same_run_id_is_refused_or_supersedes_the_first_and_never_mixes(
    pipe: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    async with consuming(pipe, 0, 1, 2, 3) as daemon:
        with trainer(pipe, attempt=1, shard=large_shard) as first:
            for rollout_id in (0, 1):
                assert (await first.publish(rollout_id))[0] == "published"
            await pipe.dumps_are_there(0, 1)
            with trainer(pipe, attempt=1, shard=large_shard) as refused:
                assert (await refused.publish(2, seed=202))[0] == "disabled"
            with trainer(pipe, shard=large_shard) as second:
                for rollout_id in (0, 2):
                    assert (await second.publish(rollout_id, seed=100 + rollout_id))[0] == "published"
                await pipe.dumps_are_there("0.attempt-1", 2)
                for rollout_id in (2, 3):
                    assert (await first.publish(rollout_id))[0] == "published"
                # What the first one leaves in the spool is looked for there by the second one, too.
                assert await first.close()
                assert await second.close()
        await until(lambda: daemon.stats.stale > 0)
        await until(lambda: "two trainers share one run id" in caplog.text)
    pipe.check(0, seed=100, shard=large_shard)
    pipe.check(0, name="0.attempt-1", shard=large_shard)
    pipe.check(1, shard=large_shard)
    pipe.check(2, seed=102, shard=large_shard)
    pipe.check(3, shard=large_shard)
    assert not pipe.dump("2.attempt-1").exists()
    assert not daemon.stats.dead_letters


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Room for two shards and a bit."""
    with small_file_system(tmp_path / "disk", int(2.5 * _SHARD_BYTES)) as folder:
        yield folder


async def test_rollouts_that_a_full_disk_did_not_take_are_known_as_dropped_and_the_others_are_whole(
    made: Installation, small_disk: Path
) -> None:
    with pipeline(made, small_disk / "spool") as pipe, trainer(pipe, start_shipper=False) as training:
        statuses = [(await training.publish(rollout_id))[0] for rollout_id in range(4)]
        assert statuses == ["published", "published", "dropped", "dropped"]
        async with consuming(pipe, 0, 1, 4) as daemon:
            with ship_process(*pipe.ship_options, stderr=None) as process:
                await until(lambda: len(pipe.bundles) == 0, timeout_s=60)
                assert (await training.publish(4))[0] == "published"
                assert not await training.close(), "two were dropped"
                assert await asyncio.to_thread(process.wait, 60) == 0
            await until(lambda: daemon.stats.dropped == 2)
        assert daemon.stats.dumps == 3
        for rollout_id in (0, 1, 4):
            pipe.check(rollout_id)
