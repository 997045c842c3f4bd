"""`rollcast-ship` over several spools, what it checks at start, and what it tells Prometheus."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from prometheus_client.parser import text_string_to_metric_families

from fixtures.shipping import SHIP, closed, direct, publish, ship_process
from fixtures.topic import payload_in, read_until
from rollcast.consumer.broker import Broker
from rollcast.consumer.broker._ports import free_ports
from rollcast.consumer.difference import differences
from rollcast.producer.spool.folder import SpoolFolder


@pytest.fixture
def prefix() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


def _spools(folder: Path, count: int) -> list[Path]:
    spools = [folder / f"spool-{index}" for index in range(count)]
    for rollout_id, spool in enumerate(spools):
        publish(spool, rollout_id)
    return spools


async def test_one_process_empties_several_spools_and_ends_with_their_trainers(
    broker: Broker, tmp_path: Path, prefix: str
) -> None:
    spools = _spools(tmp_path, 3)
    options = [f"--spool={spool}" for spool in spools]
    with ship_process(
        *options, f"--bootstrap={broker.bootstrap_servers}", f"--topic-prefix={prefix}", "--stop-with-trainers"
    ) as ship:
        assert await asyncio.to_thread(ship.wait, 60) == 0
    events = await read_until(broker.bootstrap_servers, f"{prefix}.records", closed(0, 1, 2))
    for rollout_id, spool in enumerate(spools):
        assert not differences(payload_in(events, rollout_id), direct(rollout_id))
        assert not SpoolFolder(spool).bundles()


async def test_a_spool_that_somebody_else_ships_is_left_to_them(broker: Broker, tmp_path: Path, prefix: str) -> None:
    taken, free = _spools(tmp_path, 2)
    lock = SpoolFolder(taken).try_own(None)
    assert lock is not None
    with (
        lock,
        ship_process(
            f"--spool={taken}",
            f"--spool={free}",
            f"--bootstrap={broker.bootstrap_servers}",
            f"--topic-prefix={prefix}",
            "--stop-with-trainers",
        ) as ship,
    ):
        assert ship.stderr is not None
        assert f"spool {taken} already has a shipper" in await asyncio.to_thread(ship.stderr.read)
        assert ship.wait(60) == 0
    assert SpoolFolder(taken).bundles()
    assert not SpoolFolder(free).bundles()


def test_sigterm_ends_all_spools_within_a_bound_and_gives_them_back(tmp_path: Path) -> None:
    spools = _spools(tmp_path, 3)
    with ship_process(*(f"--spool={spool}" for spool in spools), "--bootstrap=127.0.0.1:1") as ship:
        assert ship.stderr is not None
        seen = ""
        while not all(str(spool) in seen for spool in spools):
            line = ship.stderr.readline()
            assert line, "the shipper ended"
            seen += line if "does not take records" in line else ""
        ship.send_signal(signal.SIGTERM)
        assert ship.wait(10) == 0
    for spool in spools:
        lock = SpoolFolder(spool).try_own(None)
        assert lock is not None
        lock.close()
        assert SpoolFolder(spool).bundles()


async def _settings(broker: Broker, topic: str) -> dict[str, str]:
    admin: Any = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap_servers)
    await admin.start()
    try:
        (response,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
    finally:
        await admin.close()
    return {name: value for name, value, *_ in response.resources[0][4]}


async def test_a_missing_topic_is_created_so_that_records_are_safe(broker: Broker, tmp_path: Path, prefix: str) -> None:
    publish(tmp_path, 0)
    options = (f"--spool={tmp_path}", f"--bootstrap={broker.bootstrap_servers}", f"--topic-prefix={prefix}")
    with ship_process(*options, "--stop-with-trainers") as ship:
        assert ship.stderr is not None
        assert "set it to" not in await asyncio.to_thread(ship.stderr.read)
        assert ship.wait(60) == 0
    settings = await _settings(broker, f"{prefix}.records")
    assert settings["compression.type"] == "uncompressed"
    assert settings["min.insync.replicas"] == "1"
    assert settings["retention.ms"] == str(7 * 24 * 3_600_000)


def test_a_topic_that_may_not_be_created_is_one_sentence(broker: Broker, tmp_path: Path, prefix: str) -> None:
    options = (f"--spool={tmp_path}", f"--bootstrap={broker.bootstrap_servers}", f"--topic-prefix={prefix}")
    done = subprocess.run(
        [*SHIP, *options, "--no-create-topics"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"topic {prefix}.records does not exist" in line


def test_a_topic_that_the_brokers_cannot_create_is_one_sentence(broker: Broker, tmp_path: Path, prefix: str) -> None:
    options = (f"--spool={tmp_path}", f"--bootstrap={broker.bootstrap_servers}", f"--topic-prefix={prefix}")
    done = subprocess.run(
        [*SHIP, *options, "--replication-factor=5"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"topic {prefix}.records cannot be created: InvalidReplicationFactorError" in line


async def test_a_topic_that_endangers_records_is_warned_about_once(broker: Broker, tmp_path: Path, prefix: str) -> None:
    topic = f"{prefix}.records"
    dangerous = {"retention.ms": "60000", "compression.type": "gzip", "max.message.bytes": "200000"}
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap_servers)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(topic, 1, 1, topic_configs=dangerous)])
    finally:
        await admin.close()
    spools = _spools(tmp_path, 2)
    options = [f"--spool={spool}" for spool in spools]
    with ship_process(
        *options, f"--bootstrap={broker.bootstrap_servers}", f"--topic-prefix={prefix}", "--stop-with-trainers"
    ) as ship:
        assert ship.stderr is not None
        log = await asyncio.to_thread(ship.stderr.read)
        assert ship.wait(60) == 0
    for name, value in dangerous.items():
        assert log.count(f"topic {topic}: {name} is {value}") == 1


async def test_prometheus_sees_the_shipper_the_spool_and_the_publishers(
    broker: Broker, tmp_path: Path, prefix: str
) -> None:
    publish(tmp_path, 0)
    told = {"run_id": "run", "rank": 3, "published": 7, "dropped": {"spool full": 2}, "bytes": 10, "stall_seconds": 0.5}
    (tmp_path / ".stats-run-rank3.json").write_text(json.dumps(told | {"updated_at_ms": 1}))
    (tmp_path / ".stats-run-rank4.json").write_text("garbage")
    (port,) = free_ports(1)
    options = (f"--spool={tmp_path}", f"--bootstrap={broker.bootstrap_servers}", f"--topic-prefix={prefix}")
    with ship_process(*options, f"--metrics-port={port}") as ship:
        assert ship.stderr is not None
        while "shipped run/0-a" not in (line := await asyncio.to_thread(ship.stderr.readline)):
            assert line, "the shipper ended"
        text = await asyncio.to_thread(_get, f"http://127.0.0.1:{port}/metrics")
        ship.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(ship.wait, 10) == 0
    samples = {
        (sample.name, sample.labels.get("reason"), sample.labels.get("rank")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["rollcast_ship_shipped_bundles_total", None, None] == 1
    assert samples["rollcast_ship_records_total", None, None] == 9
    assert samples["rollcast_ship_wire_bytes_total", None, None] > 1000
    for counter in ("resent_bundles", "set_aside_bundles", "kafka_errors"):
        assert samples[f"rollcast_ship_{counter}_total", None, None] == 0
    assert samples["rollcast_spool_bundles", None, None] == 0
    assert samples["rollcast_publish_published_total", None, "3"] == 7
    assert samples["rollcast_publish_dropped_total", None, "3"] == 2
    assert samples["rollcast_publish_dropped_by_reason_total", "spool full", "3"] == 2
    assert samples["rollcast_publish_stall_seconds_total", None, "3"] == 0.5


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310  # an address of ours
        text: str = answer.read().decode()
    return text


def test_a_taken_metrics_port_is_one_sentence(broker: Broker, tmp_path: Path, prefix: str) -> None:
    port = broker.bootstrap_servers.rpartition(":")[2]
    options = (f"--spool={tmp_path}", f"--bootstrap={broker.bootstrap_servers}", f"--topic-prefix={prefix}")
    done = subprocess.run(
        [*SHIP, *options, f"--metrics-port={port}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "give another --metrics-port" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("package", ["zstandard", "aiokafka"])
def test_a_missing_package_is_one_sentence_with_its_name(package: str, tmp_path: Path) -> None:
    program = (
        f"import sys; sys.modules[{package!r}] = None; from rollcast.producer.shipper.cli import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, f"--spool={tmp_path}", "--bootstrap=x:1"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
    )
    assert done.returncode == 2
    assert done.stderr == f"rollcast-ship needs {package}: pip install 'rollcast[producer]'\n"
