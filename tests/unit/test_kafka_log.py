"""The log while Kafka is away."""

import asyncio
import logging
from collections.abc import Iterator

import pytest
from aiokafka.errors import KafkaConnectionError, NodeNotReadyError

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


def test_of_what_the_client_says_without_a_connection_each_cause_is_shown_once_as_no_fault() -> None:
    moderation = OncePerMinute()
    closed, refused = KafkaConnectionError("Connection at a:1 closed"), ConnectionRefusedError(111, "refused")
    connect = "Unable connect to node with id %s: %s"
    said = [
        ("Failed fetch messages from %s: %s", (1, closed)),
        (connect, (1, closed)),
        ("Unable to update metadata from %s", ([1],)),
        ("Error sending %s to node %s [%s] -- marking coordinator dead", ("Heartbeat", 1, NodeNotReadyError())),
        ("Marking the coordinator dead (node %s)for group %s.", (1, "group")),
        ("Heartbeat send request failed: %s. Will retry.", (NodeNotReadyError(),)),
        (connect, (1, refused)),
        (connect, (1, TimeoutError())),
        ("OffsetCommit failed for group %s - %s", ("group", "GroupLoadInProgressError")),
    ]
    records = [logging.LogRecord("aiokafka", logging.ERROR, "", 0, message, args, None) for message, args in said]
    shown = [record for record in records if moderation.filter(record)]
    assert [f"{record.levelname} {record.getMessage()}" for record in shown] == [
        "WARNING no connection to Kafka (KafkaConnectionError: Connection at a:1 closed); it is tried again",
        "WARNING no connection to Kafka ([Errno 111] refused); it is tried again",
        "WARNING no connection to Kafka (TimeoutError); it is tried again",
        "ERROR OffsetCommit failed for group group - GroupLoadInProgressError",
    ]


def test_each_handler_shows_each_cause() -> None:
    causes = [ConnectionRefusedError(111, "refused"), ConnectionResetError(104, "reset"), TimeoutError()]
    records = [_record("aiokafka", "no node: %s", cause, 0.0) for cause in causes]
    for moderation in (OncePerMinute(), OncePerMinute()):
        assert [moderation.filter(record) for record in records] == [True, True, True]
        assert [moderation.filter(record) for record in records] == [False, False, False]


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
