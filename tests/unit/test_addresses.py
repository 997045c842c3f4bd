"""Kafka's address as host:port, in every setting that takes one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rollcast.consumer.broker import BrokerConfigError, running_broker
from rollcast.consumer.config import ConsumeConfig
from rollcast.consumer.errors import BrokerUnreachableError
from rollcast.producer.config import PublisherConfig
from rollcast.producer.shipper.config import ShipperConfig
from rollcast.schemas import ContractError
from rollcast.schemas.addresses import check_bootstrap_servers
from rollcast_demo.demo import DemoOptions


def consume(addresses: str) -> None:
    ConsumeConfig(bootstrap_servers=addresses, dump_path="{run_id}/{rollout_id}.pt")


def publish(addresses: str) -> None:
    PublisherConfig(run_id="run", spool_dir="spool", bootstrap_servers=addresses)


def ship(addresses: str) -> None:
    ShipperConfig(bootstrap_servers=addresses)


def demo(addresses: str) -> None:
    DemoOptions(rollouts=1, output_dir=Path("demo"), bootstrap_servers=addresses, keep=False)


@pytest.mark.parametrize(
    "addresses",
    [
        "kafka:9092",
        "a.example:1,b.example:65535",
        "a:1, b:2",
        "127.0.0.1:9092",
        "[::1]:9092,[fe80::1%eth0]:9093",
        "b\u00fc:1",
    ],
)
@pytest.mark.parametrize("setting", [consume, publish, ship, demo])
def test_hosts_with_their_ports_are_taken(setting: Callable[[str], None], addresses: str) -> None:
    setting(addresses)


@pytest.mark.parametrize(
    ("addresses", "named"),
    [
        ("kafka", "'kafka'"),
        ("kafka:", "'kafka:'"),
        (":9092", "':9092'"),
        ("a:1,b", "'b'"),
        ("a:1,", "''"),
        ("a:1 b:2", "'a:1 b:2'"),
        ("a:b", "'a:b'"),
        ("a:0", "'a:0'"),
        ("a:65536", "'a:65536'"),
        ("a:\u0661", "'a:\u0661'"),
        ("http://kafka:9092", "'http://kafka:9092'"),
        ("user@kafka:9092", "'user@kafka:9092'"),
        ("::1", "'::1'"),
        ("::1:9092", "'::1:9092'"),
        ("[::1]", "'[::1]'"),
        ("[kafka]:9092", "'[kafka]:9092'"),
        ("[::1]9092", "'[::1]9092'"),
    ],
)
@pytest.mark.parametrize("setting", [consume, publish, ship, demo, check_bootstrap_servers])
def test_an_address_without_host_or_port_is_refused_with_the_form_it_needs(
    setting: Callable[[str], None], addresses: str, named: str
) -> None:
    with pytest.raises(ContractError, match=r"host:port\[,host:port\]") as refused:
        setting(addresses)
    assert f"and {named} is no host:port" in str(refused.value)


def test_an_address_at_which_nobody_answers_is_called_what_python_and_the_commands_call_it() -> None:
    told = str(BrokerUnreachableError("a:1", 1, "refused"))
    assert told.endswith("or correct bootstrap_servers (--bootstrap, ROLLCAST_BOOTSTRAP_SERVERS)")


def test_an_address_in_the_environment_is_held_to_the_same_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLCAST_BOOTSTRAP_SERVERS", "kafka")
    with pytest.raises(BrokerConfigError, match="'kafka' is no host:port"), running_broker():
        pass
