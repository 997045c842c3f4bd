"""The watchdog: a stalled client is told from an idle and from a busy one."""

import asyncio
from collections.abc import Iterator

import pytest

from fixtures.assembling import assembler
from rollcast.consumer.health import Health
from rollcast.consumer.retry import Retry
from rollcast.consumer.stats import Stats
from rollcast.consumer.waiting import Waiting
from rollcast.consumer.watchdog import ClientStalledError, Watchdog

STALL_AFTER_S = 0.04


class Client:
    """A client whose lag a test sets, one value for each look; the last one stays."""

    def __init__(self, *lags: int | None, busy: bool = False) -> None:
        self._lags: Iterator[int | None] = iter(lags)
        self._last = lags[-1]
        self.looks = 0
        self.seen_often = asyncio.Event()
        self.waiting_since = None if busy else asyncio.get_running_loop().time()

    async def lag(self) -> int | None:
        self.looks += 1
        if self.looks > 12:
            self.seen_often.set()
        return next(self._lags, self._last)


def watchdog() -> tuple[Watchdog, asyncio.Event, Retry]:
    stopping = asyncio.Event()
    retry = Retry(stopping, Stats())
    return Watchdog(STALL_AFTER_S, retry, asyncio.get_running_loop().time()), stopping, retry


@pytest.mark.parametrize("lag", [7, None])
async def test_a_client_that_brings_nothing_of_what_is_there_is_stalled(lag: int | None) -> None:
    watching, _, _ = watchdog()
    with pytest.raises(ClientStalledError):
        await watching.watch(Client(lag))


@pytest.mark.parametrize(("lag", "busy"), [(0, False), (7, True)])
async def test_an_idle_client_and_one_whose_records_wait_for_the_disk_are_not_stalled(lag: int, busy: bool) -> None:
    watching, stopping, _ = watchdog()
    client = Client(lag, busy=busy)
    watch = asyncio.create_task(watching.watch(client))
    await client.seen_often.wait()
    stopping.set()
    await watch
    assert watching.stalled_s is None


async def test_lag_that_a_new_client_does_not_reduce_is_unhealthy_until_records_come() -> None:
    watching, stopping, retry = watchdog()
    health = Health(retry, Waiting(assembler()), watching)
    for _ in range(2):
        with pytest.raises(ClientStalledError):
            await watching.watch(Client(7))
        (problem,) = health.live_problems()
        assert "with 7 to read" in problem
        assert problem in health.ready_problems()

    client = Client(0)
    watch = asyncio.create_task(watching.watch(client))
    await client.seen_often.wait()
    assert health.live_problems() == []
    stopping.set()
    await watch


async def test_brokers_that_do_not_answer_make_it_unready_and_not_unhealthy() -> None:
    watching, _, retry = watchdog()
    health = Health(retry, Waiting(assembler()), watching)
    with pytest.raises(ClientStalledError):
        await watching.watch(Client(None))
    assert health.live_problems() == []
    assert health.ready_problems() != []


async def test_a_kafka_that_does_not_answer_is_told_once_and_so_is_its_return(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rollcast.consumer.watchdog._SILENT_S", 0.01)
    caplog.set_level("INFO", "rollcast.consumer")
    watching, stopping, _ = watchdog()
    client = Client(0, None, None, None, None, 0, busy=True)
    watch = asyncio.create_task(watching.watch(client))
    await client.seen_often.wait()
    stopping.set()
    await watch
    told = [record.message for record in caplog.records]
    assert len(told) == 2
    assert told[0].startswith("Kafka does not answer")
    assert told[1] == "Kafka answers again"
