"""`rollcast-ship` over several spools, what it checks at start, and what it tells Prometheus."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import uuid
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from fixtures.installation import until
from fixtures.shipping import SHIP, closed, direct, publish, publish_one_and_drop, ship_process
from fixtures.topic import payload_in, read_until
from rollcast.consumer.broker import Broker
from rollcast.consumer.difference import differences
from rollcast.producer.shipper.cli import main
from rollcast.producer.shipper.stats import ShipperStats
from rollcast.producer.shipper.summary import Summary
from rollcast.producer.spool.folder import SpoolFolder
from rollcast.schemas.install import install_command


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


async def test_a_spool_that_is_not_there_yet_is_waited_for_while_the_others_are_shipped(
    broker: Broker, tmp_path: Path, prefix: str
) -> None:
    (there,) = _spools(tmp_path, 1)
    later = tmp_path / "later" / "spool"
    options = (f"--spool={later}", f"--spool={there}", f"--topic-prefix={prefix}")
    with ship_process(*options, f"--bootstrap={broker.bootstrap_servers}") as ship:
        await read_until(broker.bootstrap_servers, f"{prefix}.records", closed(0))
        assert not later.exists()
        publish(later, 1)
        await read_until(broker.bootstrap_servers, f"{prefix}.records", closed(0, 1))
        ship.send_signal(signal.SIGTERM)
        assert ship.stderr is not None
        log = await asyncio.to_thread(ship.stderr.read)
        assert ship.wait(10) == 0
    assert log.count(f"spool {later} is not there yet") == 1


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ((), "INFO rollcast.ship spool {} is empty; a publisher is waited for"),
        (("lost+found",), "INFO rollcast.ship spool {} is empty; a publisher is waited for"),
        (("a", "b"), "WARNING rollcast.ship spool {} holds a, b, and nothing of a publisher yet; one"),
        (
            ("a", "b", "c", "d"),
            "WARNING rollcast.ship spool {} holds a, b, c, ..., and nothing of a publisher yet; one",
        ),
    ],
)
async def test_a_folder_that_no_publisher_has_used_is_told_at_each_start_until_one_comes(
    broker: Broker, tmp_path: Path, prefix: str, content: tuple[str, ...], told: str
) -> None:
    spool = tmp_path / "spool"
    for name in content:
        (spool / name).mkdir(parents=True)
    spool.mkdir(exist_ok=True)
    options = (f"--spool={spool}", f"--topic-prefix={prefix}", f"--bootstrap={broker.bootstrap_servers}")
    for is_used in (False, False, True):
        if is_used:
            publish(spool, 0)
        with ship_process(*options, "--stop-with-trainers") as ship:
            assert ship.stderr is not None
            log = await asyncio.to_thread(ship.stderr.read)
            assert ship.wait(60) == 0
        assert log.count(told.format(spool)) == (0 if is_used else 1)
        assert log.count("publisher") == log.count(told.format(spool))
    await read_until(broker.bootstrap_servers, f"{prefix}.records", closed(0))
    # With its last run removed by hand it is still a spool.
    for entry in SpoolFolder(spool).path.iterdir():
        if entry.is_dir() and not entry.name.startswith("."):
            shutil.rmtree(entry)
    (spool / "shipper.log").touch()
    assert SpoolFolder(spool).is_used()


async def test_the_log_tells_what_is_shipped_where_and_why_it_ends(broker: Broker, tmp_path: Path, prefix: str) -> None:
    spools = [tmp_path / "first", tmp_path / "second"]
    publish(spools[0], 0)
    publish_one_and_drop(spools[1], 1, 2)
    options = (*(f"--spool={spool}" for spool in spools), f"--topic-prefix={prefix}", "--stop-with-trainers")
    with ship_process(*options, f"--bootstrap={broker.bootstrap_servers}") as ship:
        assert ship.stderr is not None
        log = await asyncio.to_thread(ship.stderr.read)
        assert ship.wait(10) == 0
    named = ", ".join(str(spool) for spool in spools)
    assert (
        f"rollcast {version('rollcast')} ships {named} to topic {prefix}.records at {broker.bootstrap_servers}" in log
    )
    assert "shipped in all: 2 bundles and 1 drop mark of" in log
    assert "no spool has bundles or trainers any more" in log


async def test_a_minute_in_which_something_was_shipped_is_one_line_with_bundles_and_drop_marks_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    stats = ShipperStats()
    publish_one_and_drop(tmp_path, 0, 1, 2)
    with Summary([(SpoolFolder(tmp_path), stats)], every_s=0.05):
        stats.shipped_bundles, stats.shipped_bytes, stats.wire_bytes = 3, 30_000_000, 10_000_000
        await until(lambda: "B/s; waiting: 1 bundle and 2 drop marks" in caplog.text)
        stats.shipped_bundles, stats.shipped_bytes, stats.shipped_marks = 4, 31_000_000, 1
        await until(lambda: caplog.text.count("B/s; waiting: ") == 2)
        stats.shipped_marks = 3
        await until(lambda: caplog.text.count("B/s; waiting: ") == 3)
    assert caplog.text.count("shipped: 3 bundles of 30.0 MB, as 10.0 MB on the wire") == 1
    assert caplog.text.count("shipped: 1 bundle and 1 drop mark of 1.0 MB, as 0 B on the wire") == 1
    assert caplog.text.count("shipped: 2 drop marks of 0 B") == 1
    assert caplog.text.count("shipped in all: 4 bundles and 3 drop marks of 31.0 MB") == 1


def test_help_tells_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "largest record (default: 921600)",
        "threads that cut and compress (default: 1)",
        "(default: rollcast)",
        "(default: --create-topics)",
        "(default: 127.0.0.1)",
        "Exit status: 0 told to stop, or done; 2",
    ):
        assert words in shown


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["--version"])
    assert exited.value.code == 0
    assert capsys.readouterr().out == f"rollcast-ship {version('rollcast')}\n"


def test_sigterm_ends_all_spools_within_a_bound_and_gives_them_back(tmp_path: Path) -> None:
    spools = _spools(tmp_path, 3)
    with ship_process(*(f"--spool={spool}" for spool in spools), "--bootstrap=127.0.0.1:1") as ship:
        assert ship.stderr is not None
        seen = ""
        while not all(str(spool) in seen for spool in spools):
            line = ship.stderr.readline()
            assert line, "the shipper ended"
            assert "aiokafka" not in line, "what the client says is told in one sentence of ours"
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
        said = await asyncio.to_thread(ship.stderr.read)
        assert "set it to" not in said
        assert f"created the topic {prefix}.records at {broker.bootstrap_servers}" in said
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
    assert done.returncode == 3
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("rollcast-ship:")]
    assert f"topic {prefix}.records does not exist" in line


def test_a_topic_that_the_brokers_cannot_create_is_one_sentence(broker: Broker, tmp_path: Path, prefix: str) -> None:
    options = (f"--spool={tmp_path}", f"--bootstrap={broker.bootstrap_servers}", f"--topic-prefix={prefix}")
    done = subprocess.run(
        [*SHIP, *options, "--replication-factor=5"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 3
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("rollcast-ship:")]
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
    assert done.stderr == f"rollcast-ship needs {package}: {install_command('producer')}\n"


async def test_a_spool_that_has_another_shipper_when_it_comes_is_taken_when_that_one_ends(
    broker: Broker, tmp_path: Path, prefix: str
) -> None:
    (there,) = _spools(tmp_path, 1)
    later = tmp_path / "later"
    options = (f"--spool={later}", f"--spool={there}", f"--topic-prefix={prefix}")
    with ship_process(*options, f"--bootstrap={broker.bootstrap_servers}") as ship:
        await read_until(broker.bootstrap_servers, f"{prefix}.records", closed(0))
        publish(tmp_path / "made", 1)
        lock = SpoolFolder(tmp_path / "made").try_own(None)
        assert lock is not None
        with lock:
            (tmp_path / "made").rename(later)
            assert ship.stderr is not None
            line = ""
            while "has another shipper; it is tried again" not in line:
                line = await asyncio.to_thread(ship.stderr.readline)
        await read_until(broker.bootstrap_servers, f"{prefix}.records", closed(0, 1))
        ship.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(ship.wait, 10) == 0
