"""The pure pieces of the local broker: versions, settings, the lock file, the environment of a container."""

from __future__ import annotations

import socket

import pytest

from rollcast.consumer.broker import BrokerConfig, BrokerConfigError, NoBrokerError, running_broker
from rollcast.consumer.broker._config import LOOPBACK, single_node_properties
from rollcast.consumer.broker._container import container_environment
from rollcast.consumer.broker._jars import KAFKA_VERSION, LOCK_PATH, parse_lock
from rollcast.consumer.broker._java import parse_java_major
from rollcast.consumer.broker._ports import free_ports, kafka_answers, port_is_free


@pytest.mark.parametrize(
    ("printed", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime Environment', 17),
        ('openjdk version "25" 2025-09-16', 25),
        ('openjdk version "26-ea" 2026-03-17', 26),
        ('java version "1.8.0_392"\nJava(TM) SE Runtime Environment', 8),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "21.0.4" 2024-07-16 LTS', 21),
        ("The operation couldn't be completed. Unable to locate a Java Runtime.", None),
        ("", None),
    ],
)
def test_the_java_major_version_is_read_from_what_java_prints(printed: str, major: int | None) -> None:
    assert parse_java_major(printed) == major


def test_the_lock_file_pins_kafka_its_tools_and_a_log_backend() -> None:
    jars = parse_lock(LOCK_PATH.read_text("ascii"))
    versions = {jar.artifact: jar.version for jar in jars}
    assert versions["kafka_2.13"] == versions["kafka-clients"] == versions["kafka-tools"] == KAFKA_VERSION
    assert versions["log4j-slf4j-impl"] == versions["log4j-core"]
    assert all(len(bytes.fromhex(jar.sha256)) == 32 for jar in jars)
    assert len({(jar.group, jar.artifact) for jar in jars}) == len(jars)


def test_properties_of_the_caller_win_over_our_own() -> None:
    config = BrokerConfig(properties={"message.max.bytes": "2000", "auto.create.topics.enable": "true"})
    properties = single_node_properties(config)
    assert properties["message.max.bytes"] == "2000"
    assert properties["auto.create.topics.enable"] == "true"
    assert properties["offsets.topic.replication.factor"] == "1"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"port": 0}, "port"),
        ({"port": 65536}, "port"),
        ({"heap_mb": 16}, "heap_mb"),
        ({"start_timeout_s": 0.0}, "start_timeout_s"),
        ({"properties": {"a": "1\nb=2"}}, "property"),
    ],
)
def test_a_config_no_broker_could_run_with_is_refused_by_name(arguments: dict[str, object], field: str) -> None:
    with pytest.raises(BrokerConfigError, match=field):
        BrokerConfig(**arguments)  # type: ignore[arg-type]  # wrong values are the point


def test_a_container_advertises_the_loopback_port_that_clients_use() -> None:
    environment = container_environment(BrokerConfig(properties={"message.max.bytes": "2000"}), 20_001)
    assert environment["KAFKA_ADVERTISED_LISTENERS"] == f"PLAINTEXT://{LOOPBACK}:20001"
    assert environment["KAFKA_MESSAGE_MAX_BYTES"] == "2000"


def test_the_address_in_the_environment_comes_first_and_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLCAST_BOOTSTRAP_SERVERS", "kafka.example:9092,other.example:9092")
    with running_broker() as broker:
        assert broker.kind == "external"
        assert broker.bootstrap_servers == "kafka.example:9092,other.example:9092"
        broker.wait()


def test_the_error_when_nothing_works_names_each_way_and_its_reason() -> None:
    error = NoBrokerError([("container", "no engine"), ("Kafka on a JVM", "no Java")], variable="THE_VARIABLE")
    assert str(error) == (
        "no Kafka broker can be had here (container: no engine; Kafka on a JVM: no Java); set THE_VARIABLE to "
        "the address of a running one, or make one of these ways work"
    )


def test_free_ports_are_different_and_below_those_of_outgoing_connections() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert max(ports) < 32_768


def test_a_port_on_which_somebody_listens_is_not_free_and_is_not_a_kafka() -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        assert not port_is_free(port)
    assert port_is_free(port)
    assert not kafka_answers(port)
