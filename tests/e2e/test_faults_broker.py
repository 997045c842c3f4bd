"""Kafka hurt in mid-shard: training goes on, and every dump equals what the trainer had."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from fixtures.faults import Pipeline, consuming, pipeline, trainer
from fixtures.installation import installation
from rollcast.consumer.broker import BrokerConfig, JvmBroker
from rollcast.consumer.topics import prepare_topics

pytestmark = pytest.mark.timeout(200)

_STOPPED_S = 20


@pytest.fixture(scope="module")
def hurt_broker(
    tmp_path_factory: pytest.TempPathFactory, report_to_terminal: Callable[[str], None]
) -> Iterator[JvmBroker]:
    """A broker of this file's own."""
    config = BrokerConfig(data_dir=tmp_path_factory.mktemp("broker"))
    with JvmBroker(config, report=report_to_terminal) as running:
        yield running


@pytest.fixture
async def pipe(hurt_broker: JvmBroker, tmp_path: Path) -> AsyncIterator[Pipeline]:
    made = installation(hurt_broker.bootstrap_servers, tmp_path / "dumps")
    await prepare_topics(made.config)
    with pipeline(made, tmp_path / "spool") as pipe:
        yield pipe


def _signal(broker: JvmBroker, number: signal.Signals) -> None:
    assert broker.pid is not None
    os.kill(broker.pid, number)


async def test_a_broker_that_stops_for_20_s_in_mid_shard_delays_nothing_but_the_dumps(
    pipe: Pipeline, hurt_broker: JvmBroker
) -> None:
    with trainer(pipe) as training:
        async with consuming(pipe, 0, 1, 2) as daemon:
            for rollout_id in (0, 1):
                assert (await training.publish(rollout_id))[0] == "published"
            await pipe.records_reach(10)
            _signal(hurt_broker, signal.SIGSTOP)
            try:
                assert pipe.bundles
                status, stall_s = await training.publish(2)
                assert status == "published"
                assert stall_s < _STOPPED_S / 2
                await asyncio.sleep(_STOPPED_S)
                assert daemon.stats.dumps < 2
                assert pipe.bundles
            finally:
                _signal(hurt_broker, signal.SIGCONT)
            assert await training.close()
    assert not pipe.bundles
    for rollout_id in range(3):
        pipe.check(rollout_id)


async def test_a_broker_killed_and_restarted_in_mid_shard_loses_nothing(pipe: Pipeline, hurt_broker: JvmBroker) -> None:
    with trainer(pipe) as training:
        async with consuming(pipe, 0, 1, 2):
            for rollout_id in (0, 1):
                assert (await training.publish(rollout_id))[0] == "published"
            await pipe.records_reach(10)
            hurt_broker.kill()
            assert pipe.bundles
            status, stall_s = await training.publish(2)
            assert status == "published"
            assert stall_s < _STOPPED_S / 2
            await asyncio.to_thread(hurt_broker.start)
            assert await training.close()
    for rollout_id in range(3):
        pipe.check(rollout_id)
