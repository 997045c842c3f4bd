"""From the spool to a real Kafka: what is committed arrives, whatever dies on the way."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from fixtures.publishers import spool_publisher
from fixtures.shipping import closed, direct, large_shard, publish, ship_process, small_shard
from fixtures.topic import payload_in, read_until, shards_in
from fixtures.waiting import wait_until
from rollcast.consumer.broker import Broker, JvmBroker
from rollcast.consumer.difference import differences
from rollcast.producer import Publisher, PublisherConfig, PublishStatus
from rollcast.producer.spool.folder import SpoolFolder


@contextmanager
def _shipper(spool: Path, bootstrap: str, prefix: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    with ship_process(f"--spool={spool}", f"--bootstrap={bootstrap}", f"--topic-prefix={prefix}", *options) as process:
        yield process


@pytest.fixture
def prefix() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


def _await_log(log: Path, words: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not log.exists() or words not in log.read_text():
        assert time.monotonic() < deadline, f"{log} never said {words!r}"
        time.sleep(0.1)


async def test_bundles_arrive_bit_equal_and_leave_the_spool(broker: Broker, tmp_path: Path, prefix: str) -> None:
    publish(tmp_path, 0, 1)
    with _shipper(tmp_path, broker.bootstrap_servers, prefix, "--stop-with-trainers", "--max-part-bytes=20000") as ship:
        assert ship.wait(60) == 0
    assert not SpoolFolder(tmp_path).bundles()
    events = await read_until(broker.bootstrap_servers, f"{prefix}.records", closed(0, 1))
    for rollout_id in (0, 1):
        assert not differences(payload_in(events, rollout_id), direct(rollout_id))


async def test_a_publisher_starts_its_shipper_and_close_waits_for_delivery(
    broker: Broker, tmp_path: Path, prefix: str
) -> None:
    config = PublisherConfig(
        run_id="run", spool_dir=tmp_path, bootstrap_servers=broker.bootstrap_servers, topic_prefix=prefix
    )
    publisher = Publisher(config)
    result = publisher.publish(0, small_shard(0))
    assert result.status is PublishStatus.PUBLISHED
    assert publisher.close(60)
    events = await read_until(broker.bootstrap_servers, f"{prefix}.records", closed(0))
    assert not differences(payload_in(events, 0), direct(0))


async def test_a_shipper_for_another_address_does_not_keep_the_run_from_the_right_one(
    broker: Broker, tmp_path: Path, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    def publisher(bootstrap_servers: str) -> Publisher:
        return Publisher(
            PublisherConfig(
                run_id="run", spool_dir=str(tmp_path), bootstrap_servers=bootstrap_servers, topic_prefix=prefix
            )
        )

    wrong = publisher("127.0.0.1:1")
    wrong.publish(0, small_shard(0))
    _await_log(tmp_path / "shipper.log", "does not take records")
    assert not wrong.close(0.1)
    assert (
        f"waiting in {tmp_path} for Kafka at 127.0.0.1:1: 1 bundle, and the rollcast-ship that runs there goes on"
        in caplog.text
    )
    assert "127.0.0.1:1 does not take records" in caplog.text
    right = publisher(broker.bootstrap_servers)
    right.publish(1, small_shard(1))
    assert right.close(60)
    await read_until(broker.bootstrap_servers, f"{prefix}.records", closed(0, 1))


def test_the_shipper_that_a_publisher_starts_is_found_by_its_name(tmp_path: Path) -> None:
    publisher = spool_publisher(tmp_path, start_shipper=True)
    publisher.publish(0, small_shard(0))
    _await_log(tmp_path / "shipper.log", "does not take records")
    publisher.close(0.1)
    assert "rollcast-ship" in _end_shipper(tmp_path)


def test_a_trainer_with_a_wrong_address_hears_of_it_while_it_trains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollcast.producer.undelivered._LOOK_EVERY_S", 0.0)
    monkeypatch.setattr("rollcast.producer.undelivered._QUIET_S", 0.1)
    publisher = spool_publisher(tmp_path, start_shipper=True, bootstrap_servers="127.0.0.1:1")
    publisher.publish(0, small_shard(0))
    _await_log(tmp_path / "shipper.log", "does not take records")
    wait_until(lambda: "nothing has gone to Kafka for " in caplog.text)
    assert f"waiting in {tmp_path} for Kafka at 127.0.0.1:1: 1 bundle, and the rollcast-ship that runs" in caplog.text
    assert f"{tmp_path / 'shipper.log'} ends with: " in caplog.text
    publisher.close(0.1)
    _end_shipper(tmp_path)


def _end_shipper(spool: Path) -> list[str]:
    """Ends the shipper that this process has started; returns its command."""
    (shipper,) = [child for child in psutil.Process().children() if f"--spool={spool}" in _words_of(child)]
    words = _words_of(shipper)
    shipper.terminate()
    assert shipper.wait(10) == 0
    return words


def _words_of(process: psutil.Process) -> list[str]:
    # Others that this process has started may have ended.
    with suppress(psutil.Error):
        words: list[str] = process.cmdline()
        return words
    return []


async def test_a_broker_killed_in_mid_bundle_loses_nothing(own_broker: JvmBroker, tmp_path: Path, prefix: str) -> None:
    spool = tmp_path / "spool"
    publish(spool, 0, 1, shard=large_shard)
    with _shipper(spool, own_broker.bootstrap_servers, prefix, "--stop-with-trainers") as ship:
        await read_until(own_broker.bootstrap_servers, f"{prefix}.records", lambda events: len(events) > 3)
        own_broker.kill()
        assert SpoolFolder(spool).bundles()
        own_broker.start()
        assert ship.wait(100) == 0
    events = await read_until(own_broker.bootstrap_servers, f"{prefix}.records", closed(0, 1))
    for rollout_id in (0, 1):
        assert not differences(payload_in(events, rollout_id), direct(rollout_id, large_shard))


async def test_a_shipper_killed_in_mid_bundle_is_followed_by_another(
    broker: Broker, tmp_path: Path, prefix: str
) -> None:
    publish(tmp_path, 0, shard=large_shard)
    with _shipper(tmp_path, broker.bootstrap_servers, prefix) as first:
        await read_until(broker.bootstrap_servers, f"{prefix}.records", lambda events: len(events) > 3)
        first.kill()
        first.wait()
    with _shipper(tmp_path, broker.bootstrap_servers, prefix, "--stop-with-trainers") as second:
        assert second.wait(60) == 0
    events = await read_until(broker.bootstrap_servers, f"{prefix}.records", closed(0))
    assert not differences(payload_in(events, 0), direct(0, large_shard))


async def test_a_poison_bundle_is_set_aside_with_its_reason_and_blocks_nobody(
    broker: Broker, tmp_path: Path, prefix: str
) -> None:
    publish(tmp_path, 0, 1)
    (_, first), _ = SpoolFolder(tmp_path).bundles()
    (first / "records.avro").write_bytes(b"garbage")
    with _shipper(tmp_path, broker.bootstrap_servers, prefix, "--stop-with-trainers") as ship:
        assert ship.wait(60) == 0
    events = await read_until(broker.bootstrap_servers, f"{prefix}.records", closed(1))
    assert not differences(payload_in(events, 1), direct(1))
    (reason,) = tmp_path.rglob("reason.txt")
    assert "records.avro" in reason.read_text()


async def _create_topic(broker: Broker, topic: str, max_message_bytes: int) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap_servers)
    await admin.start()
    try:
        settings = {"max.message.bytes": str(max_message_bytes)}
        await admin.create_topics([NewTopic(topic, 1, 1, topic_configs=settings)])
    finally:
        await admin.close()


async def test_records_are_cut_to_what_the_topic_takes(broker: Broker, tmp_path: Path, prefix: str) -> None:
    await _create_topic(broker, f"{prefix}.records", 100_000)
    publish(tmp_path, 0, shard=large_shard)
    publish(tmp_path, 1)
    with _shipper(tmp_path, broker.bootstrap_servers, prefix, "--stop-with-trainers") as ship:
        assert ship.wait(100) == 0
    events = await read_until(broker.bootstrap_servers, f"{prefix}.records", closed(0, 1))
    assert not differences(payload_in(events, 0), direct(0, large_shard))
    assert not differences(payload_in(events, 1), direct(1))


async def test_a_bundle_that_no_record_can_carry_is_set_aside_announced_and_blocks_nobody(
    broker: Broker, tmp_path: Path, prefix: str
) -> None:
    await _create_topic(broker, f"{prefix}.records", 10_000)
    publish(tmp_path, 0, shard=large_shard)
    with _shipper(tmp_path, broker.bootstrap_servers, prefix, "--stop-with-trainers") as ship:
        assert ship.wait(60) == 0
    (event,) = await read_until(broker.bootstrap_servers, f"{prefix}.records", closed(0))
    reason = shards_in([event], 0)[0].dropped_reason
    assert reason is not None
    assert "takes no record of 16384 bytes" in reason


async def test_a_dropped_rollout_is_announced(broker: Broker, tmp_path: Path, prefix: str) -> None:
    config = PublisherConfig(
        run_id="run", spool_dir=tmp_path, bootstrap_servers="127.0.0.1:1", start_shipper=False, max_spool_bytes=1
    )
    publisher = Publisher(config)
    assert publisher.publish(0, small_shard(0)).status is PublishStatus.DROPPED
    publisher.close(0.2)
    with _shipper(tmp_path, broker.bootstrap_servers, prefix, "--stop-with-trainers") as ship:
        assert ship.wait(60) == 0
    (event,) = await read_until(broker.bootstrap_servers, f"{prefix}.records", closed(0))
    reason = shards_in([event], 0)[0].dropped_reason
    assert reason is not None
    assert reason.startswith("rank 0 (shard 0): spool full")


def test_without_a_broker_bundles_wait_and_sigterm_ends_the_shipper_within_its_bound(tmp_path: Path) -> None:
    publish(tmp_path, 0)
    with _shipper(tmp_path, "127.0.0.1:1", "none") as ship:
        assert ship.stderr is not None
        line = ship.stderr.readline()
        while "does not take records" not in line:
            assert line, "the shipper ended"
            line = ship.stderr.readline()
        assert "127.0.0.1:1" in line
        ship.send_signal(signal.SIGTERM)
        assert ship.wait(10) == 0
    assert len(SpoolFolder(tmp_path).bundles()) == 1


def test_a_spool_has_one_shipper(tmp_path: Path) -> None:
    lock = SpoolFolder(tmp_path).try_own(None)
    assert lock is not None
    with lock, _shipper(tmp_path, "127.0.0.1:1", "none") as second:
        assert second.stderr is not None
        assert "already has a shipper" in second.stderr.read()
        assert second.wait(10) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--spool=/nonexistent/spool", "--bootstrap=x:1", "--stop-with-trainers"], "/nonexistent/spool is no folder"),
        ([f"--spool={__file__}/spool", "--bootstrap=x:1"], f"{__file__} is no folder; give the spool_dir"),
        (["--spool=.", "--bootstrap="], "ROLLCAST_BOOTSTRAP_SERVERS"),
        (["--spool=.", "--bootstrap=x:1", "--topic-prefix=a b"], "topic prefix 'a b'"),
        (["--spool=.", "--bootstrap=x:1", "--max-part-bytes=1"], "max_part_bytes is 1"),
    ],
)
def test_a_wrong_setting_is_one_sentence_and_a_status(options: list[str], words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rollcast.producer.shipper.cli", *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_shipper_starts_without_torch(tmp_path: Path) -> None:
    program = "import sys; import rollcast.producer.shipper.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, cwd=tmp_path, env=os.environ).returncode == 0
