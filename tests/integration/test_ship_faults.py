"""What Kafka and the network may do to a shipper: nothing is lost, nothing grows, nobody blocks the others."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from fixtures.faults import Pipeline, consuming
from fixtures.installation import installation, until
from fixtures.kafka_proxy import KafkaProxy, swallowed, with_error
from fixtures.shipping import closed, direct, large_shard, publish, ship_process, shipper, small_shard
from fixtures.topic import payload_in, read_until
from rollcast.consumer.broker import Broker
from rollcast.consumer.broker._ports import free_ports
from rollcast.consumer.difference import differences
from rollcast.producer.errors import ShipperRefusedError
from rollcast.producer.shipper.config import ShipperConfig
from rollcast.producer.shipper.sidecar import Sidecar
from rollcast.producer.spool.folder import SpoolFolder
from rollcast.schemas import DpShard, Event, SamplePart, Topics

_OUT_OF_ORDER_SEQUENCE = 45
_INVALID_RECORD = 87
_TOPIC_AUTHORIZATION_FAILED = 29


@pytest.fixture
def topics() -> Topics:
    return Topics(f"test-{uuid.uuid4().hex[:12]}")


def _config(proxy: KafkaProxy, topics: Topics, **options: object) -> ShipperConfig:
    settings: dict[str, object] = {"request_timeout_ms": 1_000, "delivery_timeout_ms": 3_000, "partitions": 1}
    return ShipperConfig(
        bootstrap_servers=proxy.bootstrap_servers,
        topics=topics,
        stop_with_trainers=True,
        **(settings | options),  # type: ignore[arg-type]
    )


def _repeats(events: Sequence[Event]) -> int:
    parts = Counter((part.rollout_id, part.slot, part.part) for part in events if isinstance(part, SamplePart))
    return parts.total() - len(parts)


async def test_an_out_of_sequence_producer_is_replaced_and_the_unacknowledged_sent_anew(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    publish(tmp_path, 0, 1, shard=large_shard)
    answers = 0

    async def spoil_the_sixth(answer: bytes) -> bytes:
        nonlocal answers
        answers += 1
        return with_error(answer, _OUT_OF_ORDER_SEQUENCE) if answers == 6 else answer

    async with KafkaProxy(broker.bootstrap_servers, spoil_the_sixth) as proxy:
        with shipper(tmp_path, _config(proxy, topics)) as ship:
            await ship.run()
    assert (ship.stats.kafka_errors, ship.stats.shipped_bundles) == (1, 2)
    assert ship.stats.resent_bundles > 0
    events = await read_until(broker.bootstrap_servers, topics.records, closed(0, 1))
    assert _repeats(events) >= 5
    made = installation(broker.bootstrap_servers, tmp_path / "dumps")
    pipe = Pipeline(installation=replace(made, config=replace(made.config, topics=topics)), spool=tmp_path)
    async with consuming(pipe, 0, 1) as daemon:
        await until(lambda: daemon.stats.records == len(events))
    assert daemon.stats.duplicates == _repeats(events)
    for rollout_id in (0, 1):
        pipe.check(rollout_id, shard=large_shard)


async def test_what_is_stored_but_never_acknowledged_expires_and_is_sent_anew(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    publish(tmp_path, 0, 1, shard=large_shard)
    answers = 0

    async with KafkaProxy(broker.bootstrap_servers) as proxy:
        with shipper(tmp_path, _config(proxy, topics)) as ship:

            async def lose_from_the_sixth_until_it_is_noticed(answer: bytes) -> bytes | None:
                nonlocal answers
                answers += 1
                return answer if answers < 6 or ship.stats.kafka_errors else None

            proxy.on_produced = lose_from_the_sixth_until_it_is_noticed
            await ship.run()
    assert (ship.stats.kafka_errors, ship.stats.shipped_bundles) == (1, 2)
    events = await read_until(broker.bootstrap_servers, topics.records, closed(0, 1))
    assert _repeats(events) >= 5
    for rollout_id in (0, 1):
        assert not differences(payload_in(events, rollout_id), direct(rollout_id, large_shard))


async def test_the_next_bundle_is_sent_while_the_last_one_waits_and_no_closing_event_comes_early(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    publish(tmp_path, 0, 1)
    async with KafkaProxy(broker.bootstrap_servers) as proxy:
        with shipper(tmp_path, _config(proxy, topics, delivery_timeout_ms=20_000, request_timeout_ms=20_000)) as ship:
            parts_of_both = 2 * (len(small_shard(0)["tokens"]) + 1)
            both_are_sent = asyncio.Event()

            async def wait_for_the_next_bundle(answer: bytes) -> bytes:
                await until(lambda: ship.stats.records >= parts_of_both)
                both_are_sent.set()
                return answer

            proxy.on_produced = wait_for_the_next_bundle
            async with asyncio.timeout(20):
                await ship.run()
    assert both_are_sent.is_set()
    events = await read_until(broker.bootstrap_servers, topics.records, closed(0, 1))
    kinds = [(event.rollout_id, type(event)) for event in events if isinstance(event, (SamplePart, DpShard))]
    for rollout_id in (0, 1):
        assert kinds.index((rollout_id, DpShard)) > max(
            at for at, kind in enumerate(kinds) if kind == (rollout_id, SamplePart)
        )
    assert kinds.index((1, SamplePart)) < kinds.index((0, DpShard))


async def test_a_bundle_that_the_broker_always_refuses_goes_last(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    publish(tmp_path, 0, 1, 2)
    async with KafkaProxy(broker.bootstrap_servers) as proxy:
        with shipper(tmp_path, _config(proxy, topics, max_open_bundles=1)) as ship:
            refused_until = asyncio.Event()

            async def refuse_the_first_bundle(answer: bytes) -> bytes:
                # Bundle 0 goes first, and again first until it was refused; then the others have their turn.
                if not ship.stats.kafka_errors:
                    return with_error(answer, _INVALID_RECORD)
                refused_until.set()
                return answer

            proxy.on_produced = refuse_the_first_bundle
            await ship.run()
    events = await read_until(broker.bootstrap_servers, topics.records, closed(0, 1, 2))
    assert refused_until.is_set()
    order = [event.rollout_id for event in events if isinstance(event, DpShard)]
    assert order == [1, 2, 0]


async def test_a_write_that_is_not_allowed_is_told_shown_and_tried_again(
    broker: Broker, topics: Topics, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish(tmp_path, 0)
    allowed = False

    async def answer_as_allowed(answer: bytes) -> bytes:
        return answer if allowed else with_error(answer, _TOPIC_AUTHORIZATION_FAILED)

    async with KafkaProxy(broker.bootstrap_servers, answer_as_allowed) as proxy:
        with shipper(tmp_path, _config(proxy, topics, retry_max_s=0.2)) as ship:
            running = asyncio.create_task(ship.run())
            await until(lambda: ship.stats.kafka_errors >= 3)
            assert ship.stats.is_refused
            assert not running.done()
            allowed = True
            await running
    assert (ship.stats.shipped_bundles, ship.stats.is_refused) == (1, False)
    assert caplog.text.count(f"does not let this client write to topic {topics.records}") == 1


async def test_a_refused_shipper_makes_room_for_the_one_that_a_trainer_can_start(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    publish(tmp_path, 0)

    async def refuse(answer: bytes) -> bytes:
        return with_error(answer, _TOPIC_AUTHORIZATION_FAILED)

    async with KafkaProxy(broker.bootstrap_servers, refuse) as proxy:
        config = _config(proxy, topics, retry_max_s=0.2, only_matching_runs=True)
        SpoolFolder(tmp_path).set_destination("run", config.destination or "")
        with shipper(tmp_path, config) as ship:
            running = asyncio.create_task(ship.run())
            # As long as nobody could follow it stays.
            await until(lambda: ship.stats.kafka_errors >= 2)
            assert not running.done()
            with SpoolFolder(tmp_path).register_trainer(), pytest.raises(ShipperRefusedError, match="write to topic"):
                await running
    assert len(SpoolFolder(tmp_path).bundles()) == 1


async def test_a_sidecar_that_kafka_refuses_when_it_first_answers_ends_whole_and_gives_all_spools_back(
    broker: Broker, topics: Topics, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spools = [tmp_path / name for name in ("one", "two")]
    for spool in spools:
        publish(spool, 0)
    (port,) = free_ports(1)
    config = ShipperConfig(bootstrap_servers=f"127.0.0.1:{port}", topics=topics, create_topics=False, retry_max_s=0.2)
    running = asyncio.create_task(Sidecar(config, spools).run())
    await until(lambda: all(f"bundles wait in {spool}" in caplog.text for spool in spools))
    async with KafkaProxy(broker.bootstrap_servers, port=port):
        with pytest.raises(ShipperRefusedError, match="does not exist"):
            await running
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "ship-spool"]
    for spool in spools:
        assert len(SpoolFolder(spool).bundles()) == 1
        lock = SpoolFolder(spool).try_own(None)
        assert lock is not None
        lock.close()


async def test_a_shipper_of_an_empty_spool_says_of_no_bundle_that_it_waits(
    topics: Topics, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = ShipperConfig(bootstrap_servers="127.0.0.1:1", topics=topics, retry_max_s=0.2)
    with shipper(tmp_path, config) as ship:
        running = asyncio.create_task(ship.run())
        await until(lambda: "next try in" in caplog.text)
        assert f"no bundle waits in {tmp_path}, next try in " in caplog.text
        assert "bundles wait" not in caplog.text
        await until(lambda: ship.stats.kafka_errors >= 4)
        assert caplog.text.count("no bundle waits") == 1, "what does not change is told once a minute"
        publish(tmp_path, 0)
        await until(lambda: f"; bundles wait in {tmp_path}, next try in " in caplog.text)
        told = ship.stats.kafka_errors
        await until(lambda: ship.stats.kafka_errors >= told + 3)
        assert caplog.text.count("bundles wait in") == 1, "the pause is the longest already"
        running.cancel()
        await asyncio.wait({running})


async def test_a_shipper_of_a_trainer_ends_when_the_spool_is_removed(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    spool = tmp_path / "spool"
    publish(spool, 0)
    config = ShipperConfig(bootstrap_servers=broker.bootstrap_servers, topics=topics, stop_with_trainers=True)
    with SpoolFolder(spool).register_trainer(), shipper(spool, config) as ship:
        running = asyncio.create_task(ship.run())
        await until(lambda: ship.stats.shipped_bundles == 1)
        shutil.rmtree(spool)
        async with asyncio.timeout(10):
            await running


_MEASURED = """
import asyncio, sys
from pathlib import Path
from rollcast.producer.shipper.config import ShipperConfig
from rollcast.producer.shipper.sidecar import Sidecar
from rollcast.schemas.topics import Topics

config = ShipperConfig(
    bootstrap_servers=sys.argv[2], topics=Topics(sys.argv[3]), request_timeout_ms=1_000, delivery_timeout_ms=3_000
)
asyncio.run(Sidecar(config, [Path(sys.argv[1])]).run())
"""


async def test_a_broker_that_acknowledges_nothing_does_not_make_the_shipper_grow(
    broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    def shard(rollout_id: int) -> dict[str, object]:
        # 100 records of a megabyte; no two clients may hold theirs at once.
        import torch

        tensors = [torch.randn(225_000) for _ in range(100)]
        return {"response_lengths": [225_000] * 100, "values": tensors, "partition": list(range(100))}

    publish(tmp_path, *range(10), shard=shard)
    async with KafkaProxy(broker.bootstrap_servers, swallowed) as proxy:
        command = [sys.executable, "-c", _MEASURED, str(tmp_path), proxy.bootstrap_servers, topics.prefix]
        child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)  # noqa: ASYNC220  # a fork, no wait
        try:
            assert child.stderr is not None
            given_up: list[str] = []
            reading = asyncio.create_task(asyncio.to_thread(_read_until_given_up, child, given_up, 3))
            base, peak = None, 0
            # Sampled, for peak counters include the pages of the mapped bundles, which the kernel may drop.
            while not reading.done():
                await asyncio.wait({reading}, timeout=0.05)
                with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
                    now = _anonymous_bytes(child.pid)
                    peak = max(peak, now)
                    if base is None and psutil.Process(child.pid).net_connections():
                        base = now
            assert len(given_up) == 3
        finally:
            child.kill()
            child.communicate()
    assert base is not None
    assert len(SpoolFolder(tmp_path).bundles()) == 10
    assert peak - base < 100e6, f"grew by {(peak - base) / 1e6:.0f} MB"


def _read_until_given_up(child: "subprocess.Popen[str]", given_up: list[str], times: int) -> None:
    assert child.stderr is not None
    while len(given_up) < times and (line := child.stderr.readline()):
        if "does not take records" in line:
            given_up.append(line)


def _anonymous_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def test_a_broker_that_never_answers_does_not_keep_the_shipper_from_ending(tmp_path: Path) -> None:
    publish(tmp_path, 0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with ship_process(f"--spool={tmp_path}", f"--bootstrap=127.0.0.1:{port}", env={**os.environ}) as ship:
            connection, _ = silent.accept()
            with connection:
                ship.send_signal(signal.SIGTERM)
                assert ship.wait(10) == 0
    assert len(SpoolFolder(tmp_path).bundles()) == 1


async def test_a_spool_that_cannot_be_listed_for_a_while_ends_nobody(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    config = ShipperConfig(bootstrap_servers="127.0.0.1:1", stop_with_trainers=True, retry_max_s=0.2)
    with shipper(spool, config) as ship:
        spool.rename(tmp_path / "away")
        spool.touch()
        running = asyncio.create_task(ship.run())
        await until(lambda: "the spool cannot be read" in (ship.stats.trouble or "") or running.done())
        spool.unlink()
        (tmp_path / "away").rename(spool)
        await running
    assert ship.stats.trouble is not None
