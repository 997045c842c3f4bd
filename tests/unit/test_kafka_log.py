"""The log while Kafka is away."""

import asyncio
import logging
from collections.abc import Iterator

import pytest

from rollcast.schemas.kafka_log import OncePerMinute, client_log_shown_after, hide_client_log


@pytest.fixture
def shown(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    root = logging.getLogger()
    filters = [(handler, [*handler.filters]) for handler in root.handlers]
    yield caplog
    logging.getLogger("aiokafka").setLevel(logging.NOTSET)
    for handler, before in filters:
        handler.filters[:] = before


def _record(name: str, message: str, argument: object, at: float) -> logging.LogRecord:
    record = logging.LogRecord(name, logging.ERROR, "", 0, message, (argument,), None)
    record.created = at
    return record


@pytest.mark.parametrize(("name", "shown"), [("aiokafka.client", [0, 60, 120]), ("rollcast.ship", list(range(150)))])
def test_what_the_client_repeats_is_shown_once_a_minute_and_our_own_words_always(name: str, shown: list[int]) -> None:
    moderation = OncePerMinute()
    assert [at for at in range(150) if moderation.filter(_record(name, "no node %s", at, float(at)))] == shown


def test_another_message_is_shown_at_once() -> None:
    moderation = OncePerMinute()
    assert moderation.filter(_record("aiokafka", "no node %s", 1, 0.0))
    assert moderation.filter(_record("aiokafka", "no topic %s", 1, 0.0))


async def test_the_client_is_heard_when_a_broker_has_let_it_in_and_not_before(shown: pytest.LogCaptureFixture) -> None:
    client, let_in = logging.getLogger("aiokafka.client"), asyncio.Event()
    hide_client_log()
    async with client_log_shown_after(let_in):
        await asyncio.sleep(0)
        client.error("Unable connect to %s", "127.0.0.1:1")
        assert not shown.records
        let_in.set()
        await asyncio.sleep(0)
    for _ in range(3):
        client.error("Unable connect to %s", "127.0.0.1:1")
    client.info("a detail")
    assert [record.getMessage() for record in shown.records] == ["Unable connect to 127.0.0.1:1"]
