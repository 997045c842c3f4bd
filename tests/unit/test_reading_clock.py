"""A silence of Kafka, told from a pause of the reader."""

import pytest

from rollcast.consumer.reading_clock import ReadingClock


def test_it_runs_while_everything_is_read_and_stands_still_while_kafka_is_away() -> None:
    clock = ReadingClock()
    clock.advance(100.0)
    assert clock.now == 0.0
    for moment in (100.5, 101.0, 101.5):
        clock.advance(moment)
    assert clock.now == pytest.approx(1.5)
    clock.advance(4000.0)
    assert clock.now <= 3.5
    before = clock.now
    clock.advance(3999.0)
    assert clock.now == before
