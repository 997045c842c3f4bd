"""Logging in to a Kafka that asks for it, from the spool to the dump, and never telling the secret."""

import asyncio
import os
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.installation import until
from fixtures.secured_broker import PASSWORD, USER, SecuredBroker
from fixtures.shipping import SHIP, closed, direct, publish, ship_process, shipper, small_shard
from fixtures.topic import payload_in, read_until
from fixtures.waiting import wait_until
from rollcast.consumer import ConsumeConfig, Daemon
from rollcast.consumer.difference import differences
from rollcast.consumer.dump_file import load_dump
from rollcast.consumer.rebuilding import rebuild
from rollcast.producer import Publisher, PublisherConfig
from rollcast.producer.errors import ShipperRefusedError
from rollcast.producer.shipper.config import ShipperConfig
from rollcast.producer.spool.folder import SpoolFolder
from rollcast.schemas import Topics
from rollcast.schemas.kafka_access import KafkaRefusedError, explain
from rollcast.schemas.kafka_security import read_kafka_security


@pytest.fixture
def prefix() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


def _environment(**settings: str) -> dict[str, str]:
    return {**os.environ, **{f"ROLLCAST_{name}": value for name, value in settings.items()}}


def _login(mechanism: str, **further: str) -> dict[str, str]:
    return _environment(SASL_MECHANISM=mechanism, SASL_USERNAME=USER, **further)


def _environments(secured: SecuredBroker, folder: Path) -> list[tuple[str, dict[str, str]]]:
    file = folder / "password"
    file.write_text(PASSWORD + "\n")
    authority = str(secured.authority)
    in_clear = {"SECURITY_PROTOCOL": "SASL_PLAINTEXT", "SASL_PASSWORD": PASSWORD}
    over_tls = {"SECURITY_PROTOCOL": "SASL_SSL", "TLS_CA_FILE": authority, "SASL_PASSWORD_FILE": str(file)}
    client = {"SECURITY_PROTOCOL": "SSL", "TLS_CA_FILE": authority, "TLS_CERT_FILE": str(secured.client)}
    return [
        (secured.sasl_address, _login("PLAIN", **in_clear)),
        (secured.sasl_address, _login("SCRAM-SHA-256", **in_clear)),
        (secured.sasl_tls_address, _login("PLAIN", **over_tls)),
        (secured.sasl_tls_address, _login("SCRAM-SHA-512", **over_tls)),
        (secured.tls_address, _environment(**client)),
    ]


async def test_bundles_arrive_by_every_way_to_log_in(
    secured_broker: SecuredBroker, tmp_path: Path, prefix: str
) -> None:
    for rollout_id, (address, environment) in enumerate(_environments(secured_broker, tmp_path)):
        spool = tmp_path / f"spool-{rollout_id}"
        publish(spool, rollout_id)
        options = (f"--spool={spool}", f"--bootstrap={address}", f"--topic-prefix={prefix}", "--stop-with-trainers")
        done = await asyncio.to_thread(
            subprocess.run, [*SHIP, *options], env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert PASSWORD not in done.stderr
    events = await read_until(secured_broker.plain_address, f"{prefix}.records", closed(0, 1, 2, 3, 4))
    for rollout_id in range(5):
        assert not differences(payload_in(events, rollout_id), direct(rollout_id))


async def test_the_daemon_and_a_rebuild_log_in_with_the_same_settings(
    secured_broker: SecuredBroker, tmp_path: Path, prefix: str
) -> None:
    _, environment = _environments(secured_broker, tmp_path)[3]
    publish(tmp_path / "spool", 0)
    options = ("--stop-with-trainers", f"--spool={tmp_path / 'spool'}", f"--topic-prefix={prefix}")
    with ship_process(*options, f"--bootstrap={secured_broker.sasl_tls_address}", env=environment) as ship:
        assert await asyncio.to_thread(ship.wait, 60) == 0
    config = ConsumeConfig(
        bootstrap_servers=secured_broker.sasl_tls_address,
        dump_path=str(tmp_path / "{run_id}" / "{rollout_id}.pt"),
        topics=Topics(prefix),
        group_id=prefix,
        security=read_kafka_security(environment),
    )
    daemon = Daemon(config)
    running = asyncio.create_task(daemon.run())
    await read_until(secured_broker.plain_address, f"{prefix}.dumps", lambda events: len(events) == 1)
    daemon.shutdown()
    await running
    assert not differences(load_dump(tmp_path / "run" / "0.pt"), direct(0))

    (tmp_path / "run" / "0.pt").unlink()
    (again,) = [each async for each in rebuild(config, "run", [0])]
    assert again.done
    assert not differences(load_dump(tmp_path / "run" / "0.pt"), direct(0))


def test_a_launched_shipper_inherits_the_settings_and_shows_no_secret(
    secured_broker: SecuredBroker, tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, environment = _environments(secured_broker, tmp_path)[1]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    spool = tmp_path / "spool"
    publisher = Publisher(
        PublisherConfig(run_id="run", spool_dir=spool, bootstrap_servers=address, topic_prefix=prefix)
    )
    publisher.publish(0, small_shard(0))
    command_lines = set[bytes]()
    with ThreadPoolExecutor(1) as closer:
        delivered = closer.submit(publisher.close, 60)
        while not delivered.done():
            command_lines |= _command_lines(prefix)
    assert delivered.result()
    assert command_lines
    assert not [line for line in command_lines if PASSWORD.encode() in line]
    assert PASSWORD not in (spool / "shipper.log").read_text()


def _command_lines(word: str) -> set[bytes]:
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if word.encode() in line:
            found.add(line)
    return found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ROLLCAST_SASL_PASSWORD": "wrong-secret"}, "does not accept user 'trainer' with this password"),
        (
            {"ROLLCAST_SASL_MECHANISM": "SCRAM-SHA-256", "ROLLCAST_SASL_PASSWORD": "wrong-secret"},
            "does not accept user",
        ),
    ],
)
def test_a_refused_login_is_one_sentence_without_the_secret(
    secured_broker: SecuredBroker, tmp_path: Path, change: dict[str, str], words: str
) -> None:
    environment = _environments(secured_broker, tmp_path)[0][1] | change
    options = (f"--spool={tmp_path}", f"--bootstrap={secured_broker.sasl_address}")
    done = subprocess.run([*SHIP, *options], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3, done.stderr
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("rollcast-ship:")]
    assert words in sentence
    assert secured_broker.sasl_address in sentence
    assert "aiokafka" not in done.stderr
    assert "secret" not in done.stderr.replace(environment["ROLLCAST_SASL_PASSWORD"], "secret")


def test_a_certificate_that_nobody_vouches_for_is_one_sentence(secured_broker: SecuredBroker, tmp_path: Path) -> None:
    environment = _login("PLAIN", SECURITY_PROTOCOL="SASL_SSL", SASL_PASSWORD=PASSWORD)
    options = (f"--spool={tmp_path}", f"--bootstrap={secured_broker.sasl_tls_address}")
    done = subprocess.run([*SHIP, *options], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3, done.stderr
    assert "is not trusted" in done.stderr.splitlines()[-1]
    assert "ROLLCAST_TLS_CA_FILE" in done.stderr.splitlines()[-1]


def _mismatches(secured: SecuredBroker, folder: Path) -> list[tuple[str, dict[str, str], tuple[str, ...]]]:
    in_clear = _login("PLAIN", SECURITY_PROTOCOL="SASL_PLAINTEXT", SASL_PASSWORD=PASSWORD)
    over_tls = _environments(secured, folder)[2][1]
    no_login = _environment(SECURITY_PROTOCOL="SSL", TLS_CA_FILE=str(secured.authority))
    set_mechanism = "ROLLCAST_SASL_MECHANISM to "
    return [
        (secured.sasl_address, _environment(), ("speaks SASL_PLAINTEXT, and PLAINTEXT was tried", set_mechanism)),
        (secured.sasl_tls_address, _environment(), ("speaks SASL_SSL, and PLAINTEXT was tried", set_mechanism)),
        (secured.tls_address, _environment(), ("speaks SSL or SASL_SSL, and PLAINTEXT", "ROLLCAST_TLS_CA_FILE")),
        (secured.plain_address, in_clear, ("speaks PLAINTEXT, and SASL_PLAINTEXT was tried",)),
        (secured.plain_address, over_tls, ("speaks PLAINTEXT, and SASL_SSL was tried",)),
        (secured.sasl_address, over_tls, ("speaks SASL_PLAINTEXT, and SASL_SSL was tried",)),
        (secured.sasl_tls_address, no_login, ("speaks SASL_SSL, and SSL was tried", set_mechanism)),
        (secured.sasl_tls_address, in_clear, ("speaks SASL_SSL, and SASL_PLAINTEXT was tried",)),
    ]


def test_settings_for_another_kind_of_listener_are_told_in_one_sentence(
    secured_broker: SecuredBroker, tmp_path: Path
) -> None:
    for address, environment, words in _mismatches(secured_broker, tmp_path):
        with pytest.raises(KafkaRefusedError) as refused:
            asyncio.run(explain(address, read_kafka_security(environment)))
        for each in (address, "set ROLLCAST_SECURITY_PROTOCOL to", *words):
            assert each in str(refused.value)


def test_a_mechanism_that_the_listener_lacks_is_told_with_those_it_has(
    secured_broker: SecuredBroker, tmp_path: Path
) -> None:
    environment = _environments(secured_broker, tmp_path)[2][1]
    security = replace(read_kafka_security(environment), sasl_mechanism="SCRAM-SHA-256")
    with pytest.raises(KafkaRefusedError, match=r"does not offer SCRAM-SHA-256: .* PLAIN or SCRAM-SHA-512"):
        asyncio.run(explain(secured_broker.sasl_tls_address, security))


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["rollcast.producer.shipper.cli", "--spool={folder}", "--bootstrap={address}"], 3),
        (["rollcast.consumer.cli", "consume", "--dump-path={folder}/{{run_id}}/{{rollout_id}}.pt"], 2),
        (["rollcast.consumer.cli", "rebuild", "--dump-path={folder}/{{run_id}}/{{rollout_id}}.pt"], 2),
    ],
    ids=["rollcast-ship", "consume", "rebuild"],
)
def test_every_command_tells_what_the_listener_speaks(
    secured_broker: SecuredBroker, tmp_path: Path, command: list[str], status: int
) -> None:
    address = secured_broker.sasl_address
    options = [word.format(folder=tmp_path, address=address) for word in command]
    if status == 2:
        options.append(f"--bootstrap={address}")
    if "rebuild" in command:
        options += ["--run=run", "--rollout=0"]
    done = subprocess.run(
        [sys.executable, "-m", *options], env=_environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status, done.stderr
    assert f"Kafka at {address} speaks SASL_PLAINTEXT, and PLAINTEXT was tried" in done.stderr.splitlines()[-1]
    assert "aiokafka" not in done.stderr


def test_a_trainer_with_the_right_settings_gets_past_a_shipper_with_wrong_ones(
    secured_broker: SecuredBroker,
    tmp_path: Path,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def publisher() -> Publisher:
        return Publisher(
            PublisherConfig(
                run_id="run", spool_dir=tmp_path, bootstrap_servers=secured_broker.sasl_address, topic_prefix=prefix
            )
        )

    # Both live: the wrong one goes on starting shippers, and the right one must come in between.
    wrong = publisher()
    wrong.publish(0, small_shard(0))
    wait_until(lambda: _text(tmp_path / "shipper.log").count("PLAINTEXT was tried") >= 2)
    for name, value in _environments(secured_broker, tmp_path)[0][1].items():
        monkeypatch.setenv(name, value)
    right = publisher()
    right.publish(1, small_shard(1))
    assert right.close(60)
    assert wrong.close(60)
    assert caplog.text.count("rollcast-ship ended with status 3: rollcast-ship: Kafka at") == 1


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


async def test_a_login_refused_later_is_waited_for_and_shown(
    secured_broker: SecuredBroker, tmp_path: Path, prefix: str
) -> None:
    # A broker that forgets its users for a while must not end a shipper that has worked.
    environment = _environments(secured_broker, tmp_path)[1][1]
    config = ShipperConfig(
        bootstrap_servers=secured_broker.sasl_address,
        topics=Topics(prefix),
        security=read_kafka_security(environment),
        retry_max_s=0.5,
    )
    with shipper(tmp_path, config) as ship:
        running = asyncio.create_task(ship.run())
        publish(tmp_path, 0)
        await until(lambda: ship.stats.shipped_bundles == 1)
        await asyncio.to_thread(secured_broker.forget_users, 256)
        try:
            publish(tmp_path, 1)
            await until(lambda: ship.stats.is_refused)
            assert "does not accept user 'trainer'" in (ship.stats.trouble or "")
            assert not running.done()
        finally:
            await asyncio.to_thread(secured_broker.know_users, 256)
        await until(lambda: ship.stats.shipped_bundles == 2)
        assert not ship.stats.is_refused
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_shipper_that_was_never_let_in_ends_when_it_is_refused(
    secured_broker: SecuredBroker, tmp_path: Path, prefix: str
) -> None:
    environment = _login("PLAIN", SECURITY_PROTOCOL="SASL_PLAINTEXT", SASL_PASSWORD="wrong-secret")  # noqa: S106
    config = ShipperConfig(
        bootstrap_servers=secured_broker.sasl_address, topics=Topics(prefix), security=read_kafka_security(environment)
    )
    publish(tmp_path, 0)
    with shipper(tmp_path, config) as ship, pytest.raises(ShipperRefusedError, match="does not accept user"):
        await ship.run()
    assert SpoolFolder(tmp_path).bundles()
