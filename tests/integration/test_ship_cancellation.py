"""A shipper that is told to stop in the instant in which a Kafka client closes, which swallows cancellations."""

import asyncio
import contextlib
import uuid
from collections.abc import Coroutine
from typing import Any

import pytest
from aiokafka.client import AIOKafkaClient

from rollcast.consumer.broker import Broker
from rollcast.producer.shipper.config import ShipperConfig
from rollcast.producer.shipper.delivery import Delivery
from rollcast.producer.shipper.sidecar import Sidecar
from rollcast.producer.shipper.stats import ShipperStats
from rollcast.producer.shipper.topic import RecordsTopic
from rollcast.schemas import Topics

_close = AIOKafkaClient.close


async def _close_and_be_cancelled(client: Any) -> None:
    """Closes a client; its caller is cancelled while it waits for the client's own task, which has been cancelled."""
    caller, own = asyncio.current_task(), client._sync_task
    assert caller is not None

    async def cancel_the_caller_at_the_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            caller.cancel()

    client._sync_task = asyncio.create_task(cancel_the_caller_at_the_end())
    # It must have begun, else a cancellation would be its end before its `finally`.
    await asyncio.sleep(0)
    await _close(client)
    if own is not None:
        own.cancel()


@pytest.fixture
def _cancelled_in_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AIOKafkaClient, "close", _close_and_be_cancelled)


def _config(bootstrap_servers: str) -> ShipperConfig:
    topics = Topics(f"test-{uuid.uuid4().hex[:12]}")
    return ShipperConfig(bootstrap_servers=bootstrap_servers, topics=topics, partitions=1)


async def _open_and_close(config: ShipperConfig) -> None:
    async with Delivery(config, 1_000_000, ShipperStats()):
        pass


async def _open_and_fail(config: ShipperConfig) -> None:
    async with Delivery(config, 1_000_000, ShipperStats()):
        raise OSError("none of its bundles can be had")


async def _ends_cancelled(work: Coroutine[Any, Any, object]) -> bool:
    task = asyncio.create_task(work)
    await asyncio.wait({task})
    return task.cancelled()


@pytest.mark.usefixtures("_cancelled_in_close")
@pytest.mark.parametrize("work", [_open_and_close, _open_and_fail])
async def test_a_delivery_that_closes_passes_its_cancellation_on(broker: Broker, work: Any) -> None:
    assert await _ends_cancelled(work(_config(broker.bootstrap_servers)))


@pytest.mark.usefixtures("_cancelled_in_close")
async def test_a_delivery_that_cannot_connect_passes_its_cancellation_on() -> None:
    assert await _ends_cancelled(_open_and_close(_config("127.0.0.1:1")))


@pytest.mark.usefixtures("_cancelled_in_close")
async def test_a_topic_that_is_looked_at_passes_a_cancellation_on(broker: Broker) -> None:
    assert await _ends_cancelled(RecordsTopic(_config(broker.bootstrap_servers)).prepare())


async def test_work_that_swallows_its_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollcast.producer.shipper.sidecar._CANCEL_AGAIN_S", 0.01)

    class SwallowingSidecar(Sidecar):
        begun = asyncio.Event()

        async def _work(self) -> None:
            self.begun.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            await asyncio.Event().wait()

    sidecar = SwallowingSidecar(_config("127.0.0.1:1"), [])
    running = asyncio.create_task(sidecar.run())
    await sidecar.begun.wait()
    sidecar.shutdown()
    async with asyncio.timeout(5):
        await running
