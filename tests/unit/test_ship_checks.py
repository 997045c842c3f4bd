"""What the shipper thinks of a topic's settings, and of what publishers' files say."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollcast.producer.errors import ShipperError, SpoolError
from rollcast.producer.shipper.config import ShipperConfig
from rollcast.producer.shipper.publisher_stats import parse_publisher_stats
from rollcast.producer.shipper.safety import dangers
from rollcast.schemas import DEFAULT_LIMITS, Topics

_SAFE = {"max.message.bytes": "1048588", "cleanup.policy": "delete", "retention.bytes": "-1"}
_TOLD: dict[str, Any] = {
    "run_id": "run",
    "rank": 0,
    "published": 1,
    "dropped": {},
    "bytes": 5,
    "stall_seconds": 0.25,
    "updated_at_ms": 1,
}


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
def test_a_topic_of_our_making_endangers_nothing(replicas: int) -> None:
    assert not dangers(_SAFE | Topics().settings(replicas)["rollcast.records"], replicas, 900 * 1024)


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("min.insync.replicas", "1", "set it to 2"),
        ("min.insync.replicas", "4", "nothing can be written"),
        ("unclean.leader.election.enable", "true", "set it to false"),
        ("cleanup.policy", "compact,delete", "set it to delete"),
        ("retention.ms", "3600000", "1.0 hours"),
        ("retention.bytes", "1000000", "set it to -1"),
        ("compression.type", "zstd", "set it to uncompressed"),
        ("max.message.bytes", "100000", "they are cut smaller"),
    ],
)
def test_a_dangerous_setting_is_named_with_its_remedy(setting: str, value: str, words: str) -> None:
    (found,) = dangers(_SAFE | {"min.insync.replicas": "2", setting: value}, 3, 900 * 1024)
    assert setting in found
    assert words in found


def test_settings_that_may_not_be_read_are_no_danger() -> None:
    assert not dangers({}, 3, 900 * 1024)


def test_parts_that_no_consumer_takes_are_refused() -> None:
    with pytest.raises(ShipperError, match="the most that consumers take"):
        ShipperConfig(bootstrap_servers="x:1", max_part_bytes=DEFAULT_LIMITS.max_message_bytes + 1)


def test_a_publisher_that_dropped_nothing_counts_zero() -> None:
    assert parse_publisher_stats(json.dumps(_TOLD).encode()).dropped == 0


def test_many_reasons_become_few_series_and_no_drop_is_lost() -> None:
    dropped = {f"rollout {number} was too long": number + 1 for number in range(100)}
    found = parse_publisher_stats(json.dumps(_TOLD | {"dropped": dropped}).encode())
    assert len(found.reasons) <= 17
    assert found.dropped == sum(dropped.values())
    assert "other" in found.reasons


@pytest.mark.parametrize(
    "change",
    [
        {"published": -1},
        {"published": True},
        {"published": 1.5},
        {"published": 2**63},
        {"stall_seconds": float("nan")},
        {"stall_seconds": float("inf")},
        {"dropped": []},
        {"dropped": {"x": "y"}},
        {"rank": None},
    ],
)
def test_counters_that_make_no_sense_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(SpoolError):
        parse_publisher_stats(json.dumps(_TOLD | change).encode())


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"\xff", b"[" * 60_000, b" " * 65_537])
def test_files_that_are_no_counters_are_refused(content: bytes) -> None:
    with pytest.raises(SpoolError):
        parse_publisher_stats(content)


@given(st.binary(max_size=200))
def test_garbage_never_does_more_than_be_refused(content: bytes) -> None:
    with pytest.raises(SpoolError):
        parse_publisher_stats(content)
