"""What an event must satisfy on its own: counts, ranges, lengths, known streams."""

from dataclasses import replace

import pytest

from fixtures.assembling import closing, events
from rollcast.consumer.errors import InvalidRecordError
from rollcast.consumer.validity import check_event
from rollcast.schemas import DEFAULT_LIMITS, Limits, SamplePart


@pytest.mark.parametrize(
    "change",
    [
        {"part": 1, "part_count": 1},
        {"part": -1},
        {"part_count": 0},
        {"part_count": 2**31 - 1, "part": 5},
        {"slot": -2},
        {"slot": 2**31 - 1},
        {"data_parallel_rank": -1},
        {"data_parallel_rank": 2**31 - 1},
        {"run_id": ""},
        {"run_id": "x" * 5000},
    ],
)
def test_an_impossible_part_is_refused(change: dict[str, int | str]) -> None:
    part = next(event for event in events() if isinstance(event, SamplePart))

    with pytest.raises(InvalidRecordError):
        check_event(replace(part, **change), DEFAULT_LIMITS)  # type: ignore[arg-type]  # each value has the type of its field


@pytest.mark.parametrize(
    "change",
    [
        {"data_parallel_size": 0},
        {"data_parallel_rank": 2},
        {"data_parallel_rank": -1},
        {"data_parallel_size": 2**31 - 1},
        {"sample_count": -1},
        {"sample_count": 1},
        {"sample_count": 2**31 - 1},
        {"raw_bytes": -1},
        {"part_counts": ()},
        {"part_counts": (1, 1)},
        {"part_counts": (1, 1, 1, 1)},
        {"part_counts": (1, 0, 1)},
        {"part_counts": (1, 1, 2**31 - 1)},
    ],
)
def test_an_impossible_closing_event_is_refused(change: dict[str, int | tuple[int, ...]]) -> None:
    with pytest.raises(InvalidRecordError):
        check_event(replace(closing(events()), **change), DEFAULT_LIMITS)  # type: ignore[arg-type]  # as above


def test_caps_are_configurable() -> None:
    with pytest.raises(InvalidRecordError, match="data_parallel_size"):
        check_event(closing(events()), Limits(max_shards=1))


def test_genuine_events_pass_and_so_does_a_dropped_shard_without_counts() -> None:
    for event in events():
        check_event(event, DEFAULT_LIMITS)
    dropped = replace(closing(events()), dropped_reason="spool full", slot_digests=(), part_counts=())
    check_event(dropped, DEFAULT_LIMITS)


@pytest.mark.parametrize("stream", ["train", "policy-loss/0", "policy-loss/10", "policy-loss/999999999"])
def test_a_known_stream_passes(stream: str) -> None:
    check_event(replace(closing(events()), stream=stream), DEFAULT_LIMITS)


@pytest.mark.parametrize(
    "number", ["", "00", "01", "-1", "+1", " 1", "1_0", "1\n", "1000000000", "\u0661", "\uff11", "\u00b2"]
)
def test_a_stream_that_would_share_the_files_of_another_is_refused(number: str) -> None:
    with pytest.raises(InvalidRecordError, match="stream is"):
        check_event(replace(closing(events()), stream=f"policy-loss/{number}"), DEFAULT_LIMITS)
