"""What `rollcast-ship` tells over HTTP: metrics, whatever stands in the spool, and its health."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fixtures.installation import until
from fixtures.proxy import proxy_to
from fixtures.publishers import spool_publisher
from fixtures.shipping import SHIP, publish, ship_process, small_shard
from rollcast.consumer.broker import Broker
from rollcast.consumer.broker._ports import free_ports
from rollcast.producer.shipper.config import ShipperConfig
from rollcast.producer.shipper.health import Health
from rollcast.producer.shipper.metrics import registry_of
from rollcast.producer.shipper.publisher_stats import read_publisher_stats
from rollcast.producer.shipper.sidecar import Sidecar
from rollcast.producer.shipper.stats import ShipperStats
from rollcast.producer.shipper.topic import RecordsTopic
from rollcast.producer.spool import usage
from rollcast.producer.spool.folder import SpoolFolder
from rollcast.schemas import Topics

_TOLD = {"run_id": "run", "rank": 3, "published": 7, "dropped": {}, "bytes": 10, "stall_seconds": 0.5}


@pytest.fixture
def prefix() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


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
        _, text = await asyncio.to_thread(_get, f"http://127.0.0.1:{port}/metrics")
        ship.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(ship.wait, 10) == 0
    samples = {
        (sample.name, sample.labels.get("reason"), sample.labels.get("rank")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["rollcast_ship_shipped_bundles_total", None, None] == 1
    assert samples["rollcast_ship_shipped_marks_total", None, None] == 0
    assert samples["rollcast_ship_records_total", None, None] == 9
    assert samples["rollcast_ship_wire_bytes_total", None, None] > 1000
    for counter in ("resent_bundles", "set_aside_bundles", "kafka_errors"):
        assert samples[f"rollcast_ship_{counter}_total", None, None] == 0
    assert samples["rollcast_ship_refused", None, None] == 0
    assert samples["rollcast_spool_bundles", None, None] == 0
    assert samples["rollcast_spool_present", None, None] == 1
    assert samples["rollcast_publish_published_total", None, "3"] == 7
    assert samples["rollcast_publish_dropped_total", None, "3"] == 2
    assert samples["rollcast_publish_dropped_by_reason_total", "spool full", "3"] == 2
    assert samples["rollcast_publish_stall_seconds_total", None, "3"] == 0.5


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310  # an address of ours
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read().decode()


def test_a_taken_metrics_port_is_one_sentence(broker: Broker, tmp_path: Path, prefix: str) -> None:
    port = broker.bootstrap_servers.rpartition(":")[2]
    options = (f"--spool={tmp_path}", f"--bootstrap={broker.bootstrap_servers}", f"--topic-prefix={prefix}")
    done = subprocess.run(
        [*SHIP, *options, f"--metrics-port={port}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "give other values with --metrics-host and --metrics-port" in done.stderr.splitlines()[-1]


@asynccontextmanager
async def _sidecar(
    bootstrap: str, prefix: str, *spools: Path, host: str = "127.0.0.1", request_timeout_ms: int = 30_000
) -> AsyncIterator[str]:
    """Runs a sidecar in this process; yields the beginning of its URLs."""
    (port,) = free_ports(1)
    config = ShipperConfig(
        bootstrap_servers=bootstrap,
        topics=Topics(prefix),
        partitions=1,
        retry_max_s=0.2,
        request_timeout_ms=request_timeout_ms,
        metrics_port=port,
        metrics_host=host,
    )
    sidecar = Sidecar(config, spools)
    running = asyncio.create_task(sidecar.run())
    try:
        await until(lambda: running.done() or _listens(host, port))
        yield f"http://{f'[{host}]' if ':' in host else host}:{port}"
    finally:
        sidecar.shutdown()
        await running


def _listens(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as client:
        return client.connect_ex((host, port)) == 0


async def test_health_is_good_when_kafka_has_let_it_in(broker: Broker, tmp_path: Path, prefix: str) -> None:
    async with _sidecar(broker.bootstrap_servers, prefix, tmp_path) as url:
        ready = ""
        while ready != "ok\n":
            status, ready = await asyncio.to_thread(_get, f"{url}/readyz")
            assert (status == 200) == (ready == "ok\n")
        assert await asyncio.to_thread(_get, f"{url}/healthz") == (200, "ok\n")
        status, text = await asyncio.to_thread(_get, f"{url}/else")
        assert status == 404
        assert "/metrics, /healthz and /readyz" in text


async def test_without_kafka_it_is_alive_and_not_ready(tmp_path: Path, prefix: str) -> None:
    publish(tmp_path, 0)
    async with _sidecar("127.0.0.1:1", prefix, tmp_path) as url:
        text = ""
        while "does not take records" not in text:
            status, text = await asyncio.to_thread(_get, f"{url}/readyz")
            assert status == 503
        assert "127.0.0.1:1" in text
        assert (await asyncio.to_thread(_get, f"{url}/healthz"))[0] == 200


async def test_a_kafka_that_never_answered_is_told_with_its_address_since_when_and_what_to_check(
    tmp_path: Path, prefix: str
) -> None:
    async with _sidecar("127.0.0.1:1", prefix, tmp_path / "later") as url:
        text = ""
        while "Connect call failed" not in text:
            status, text = await asyncio.to_thread(_get, f"{url}/readyz")
            assert status == 503
    since = (
        r"Kafka at 127\.0\.0\.1:1 has not let it in since it started \d+ s ago \(\d+ s ago: .*Connect call failed.*\)"
    )
    check = ": check that it runs, that bootstrap_servers (--bootstrap) is its address as seen from this machine, and "
    assert re.fullmatch(f"{since}{re.escape(check)}ROLLCAST_SECURITY_PROTOCOL\n", text)


async def test_a_kafka_that_answers_later_is_found_before_a_spool_comes(
    broker: Broker, tmp_path: Path, prefix: str
) -> None:
    async with proxy_to(broker.bootstrap_servers) as proxy:
        proxy.stall(also_new=True)
        address = f"127.0.0.1:{proxy.port}"
        async with _sidecar(address, prefix, tmp_path / "later", request_timeout_ms=1_000) as url:
            text = ""
            while f"Kafka at {address}" not in text or "no answer yet" in text:
                _, text = await asyncio.to_thread(_get, f"{url}/readyz")
            proxy.stall()
            while not text.startswith("ok\n"):
                _, text = await asyncio.to_thread(_get, f"{url}/readyz")


async def test_a_spool_that_is_waited_for_is_told_beside_that_it_is_ready(
    broker: Broker, tmp_path: Path, prefix: str
) -> None:
    (tmp_path / "there").mkdir()
    later = tmp_path / "later"
    async with _sidecar(broker.bootstrap_servers, prefix, tmp_path / "there", later) as url:
        told = ""
        while not told.startswith("ok\n"):
            _, told = await asyncio.to_thread(_get, f"{url}/readyz")
        assert told == f"ok\nspool {later} is not there yet; it is waited for\n"
        publish(later, 0)
        while told != "ok\n":
            status, told = await asyncio.to_thread(_get, f"{url}/readyz")
            assert status == 200


async def test_a_spool_that_is_not_there_yet_has_all_series(tmp_path: Path, prefix: str) -> None:
    publish(tmp_path / "there", 0)
    async with _sidecar("127.0.0.1:1", prefix, tmp_path / "there", tmp_path / "later") as url:
        text = (await asyncio.to_thread(_get, f"{url}/metrics"))[1]
    samples = {
        (sample.name, Path(sample.labels["spool"]).name): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    names = {name for name, _ in samples if not name.startswith("rollcast_publish_")}
    assert names == {name for name, spool in samples if spool == "later"}
    assert (samples["rollcast_spool_present", "there"], samples["rollcast_spool_present", "later"]) == (1, 0)
    assert (samples["rollcast_spool_bundles", "there"], samples["rollcast_spool_bundles", "later"]) == (1, 0)
    assert samples["rollcast_ship_shipped_bundles_total", "later"] == 0
    assert not (tmp_path / "later").exists()


def test_a_spool_of_which_nothing_can_be_found_out_hides_no_other(tmp_path: Path) -> None:
    publish(tmp_path / "there", 0)
    lost = tmp_path / ("x" * 1_000)
    text = generate_latest(registry_of([lost, tmp_path / "there"], [])).decode()
    assert f'rollcast_spool_present{{spool="{lost}"}} 0.0' in text
    assert f'rollcast_spool_bundles{{spool="{tmp_path}/there"}} 1.0' in text


def test_marks_of_drops_are_no_bundles_that_wait(tmp_path: Path) -> None:
    publisher = spool_publisher(tmp_path)
    publisher.publish(0, small_shard(0))
    publisher.publish(1, {"response_lengths": [2], "tokens": []})
    publisher.close(0.2)
    text = generate_latest(registry_of([tmp_path], [])).decode()
    assert f'rollcast_spool_bundles{{spool="{tmp_path}"}} 1.0' in text
    assert f'rollcast_spool_marks{{spool="{tmp_path}"}} 1.0' in text


def test_a_scrape_looks_into_no_bundle_that_an_earlier_one_has_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, 0, 1)
    registry = registry_of([tmp_path], [])
    generate_latest(registry)
    looked: list[str] = []
    look_into = usage._look_into

    def note_and_look(bundle: os.DirEntry[str]) -> usage.SpoolUsage:
        looked.append(bundle.name)
        return look_into(bundle)

    monkeypatch.setattr(usage, "_look_into", note_and_look)
    assert f'rollcast_spool_bundles{{spool="{tmp_path}"}} 2.0' in generate_latest(registry).decode()
    assert not looked


async def test_another_address_can_be_given_for_metrics(tmp_path: Path, prefix: str) -> None:
    async with _sidecar("127.0.0.1:1", prefix, tmp_path, host="::1") as url:
        assert "rollcast_spool_bundles" in (await asyncio.to_thread(_get, f"{url}/metrics"))[1]


async def test_a_loop_that_hangs_and_a_refusal_are_reasons_to_restart(tmp_path: Path) -> None:
    loop, stats = asyncio.get_running_loop(), ShipperStats()
    topic = RecordsTopic(ShipperConfig(bootstrap_servers="x:1"))
    health = Health(topic, [(SpoolFolder(tmp_path), stats)], {}, loop, loop_timeout_s=0.2)
    assert await asyncio.to_thread(health.live_problems) == []
    stats.trouble, stats.is_refused = "Kafka does not accept user 'x'", True
    assert await asyncio.to_thread(health.live_problems) == [stats.trouble]
    answers: list[str] = []
    asked = threading.Thread(target=lambda: answers.extend(health.live_problems()))
    asked.start()
    # The loop hangs for as long as this thread waits.
    asked.join()
    assert answers == ["it has done nothing for 0.2 s"]


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.mkdir()


def _link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def _link_to_a_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to(path.with_name("pipe"))


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10**9)


@pytest.mark.parametrize("make", [_pipe, _folder, _link_to_a_device, _link_to_itself, _link_to_a_pipe, _huge])
def test_what_is_no_file_of_counters_hides_no_other(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / ".stats-bad-rank0.json")
    (tmp_path / ".stats-run-rank3.json").write_text(json.dumps(_TOLD))
    assert [found.published for found in read_publisher_stats(tmp_path)] == [7]


async def test_nonsense_in_counters_does_not_break_metrics(tmp_path: Path, prefix: str) -> None:
    nonsense: list[dict[str, Any]] = [
        {"run_id": '\ud800 \n"', "dropped": {"\udfff\\": 2, "a" * 1000: 1, "a" * 1001: 2}},
        {
            "stall_seconds": 1e308,
            "published": 2**63 - 1,
            "rank": 2**63 - 1,
            "dropped": {"x": 2**63 - 1, "y": 2**63 - 1},
        },
        {"stall_seconds": float("nan")},
        {"bytes": 10**400},
        {"run_id": [], "rank": 1},
        {"dropped": {"": 0}, "run_id": "", "rank": 2},
    ]
    for number, change in enumerate(nonsense):
        (tmp_path / f".stats-run-rank{number}.json").write_text(json.dumps(_TOLD | change))
    os.mkfifo(tmp_path / ".stats-pipe-rank0.json")
    async with _sidecar("127.0.0.1:1", prefix, tmp_path) as url:
        status, text = await asyncio.to_thread(_get, f"{url}/metrics")
    assert status == 200
    families = {family.name: family.samples for family in text_string_to_metric_families(text)}
    runs = {sample.labels["run"] for sample in families["rollcast_publish_published"]}
    assert {'? \n"', "run", ""} <= runs
    reasons = {sample.labels["reason"]: sample.value for sample in families["rollcast_publish_dropped_by_reason"]}
    assert reasons["a" * 120] == 3
    assert reasons["?\\"] == 2


async def test_a_spool_with_a_name_that_is_no_text_does_not_break_metrics(tmp_path: Path, prefix: str) -> None:
    spool = tmp_path / os.fsdecode(b"spool-\xff")
    spool.mkdir()
    async with _sidecar("127.0.0.1:1", prefix, spool) as url:
        status, text = await asyncio.to_thread(_get, f"{url}/metrics")
    assert status == 200
    assert "spool-?" in text
