"""The log while Kafka is away."""

import logging

import pytest

from rollcast.schemas.kafka_log import OncePerMinute


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
