"""The container way to a broker, against a stand-in for the Docker engine: no engine is needed, and none used."""

from __future__ import annotations

import json
import os
import socketserver
import struct
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, cast

import pytest

from rollcast.consumer.broker import BrokerConfig, ContainerBroker, ContainerUnavailableError, running_broker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONTAINER_ID = "c0ffee" * 10
# The beginning of an answer to a metadata request: size, correlation id, one broker.
METADATA_ANSWER = struct.pack(">iii", 8, 7, 1)


class AnsweringKafka(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.rfile.read(4)
        self.wfile.write(METADATA_ANSWER)


class FakeEngine(socketserver.ThreadingUnixStreamServer):
    """Speaks as much of the Docker API as starting one container takes, and remembers what was asked."""

    daemon_threads = True

    def __init__(self, path: Path, *, kafka_comes_up: bool) -> None:
        super().__init__(str(path), EngineRequest)
        self.kafka_comes_up = kafka_comes_up
        self.created: dict[str, Any] = {}
        self.removed = threading.Event()
        self.kafka: socketserver.TCPServer | None = None

    def start_container(self) -> None:
        if self.kafka_comes_up:
            binding = self.created["HostConfig"]["PortBindings"]["9092/tcp"][0]
            self.kafka = socketserver.ThreadingTCPServer((binding["HostIp"], int(binding["HostPort"])), AnsweringKafka)
            threading.Thread(target=self.kafka.serve_forever, daemon=True).start()

    def remove_container(self) -> None:
        if self.kafka is not None:
            self.kafka.shutdown()
            self.kafka.server_close()
        self.removed.set()


class EngineRequest(BaseHTTPRequestHandler):
    def engine(self) -> FakeEngine:
        return cast("FakeEngine", self.server)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def answer(self, status: int, body: object = None) -> None:
        content = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        if self.path.endswith("/version"):
            self.answer(200, {"ApiVersion": "1.44", "MinAPIVersion": "1.24"})
        elif self.path.endswith("/_ping"):
            self.answer(200, "OK")
        elif self.path.endswith("/json"):
            status = "running" if self.engine().kafka_comes_up else "exited"
            self.answer(200, {"Id": CONTAINER_ID, "State": {"Status": status}, "Config": {"Tty": True}})
        else:
            self.answer(200, "Kafka ended")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.split("?")[0].endswith("/containers/create"):
            self.engine().created = json.loads(body)
            self.answer(201, {"Id": CONTAINER_ID, "Warnings": []})
        elif self.path.endswith("/start"):
            self.engine().start_container()
            self.answer(204)
        else:
            self.answer(404, {"message": f"not spoken here: {self.path}"})

    def do_DELETE(self) -> None:
        self.engine().remove_container()
        self.answer(204)


@contextmanager
def serving(engine: FakeEngine) -> Iterator[FakeEngine]:
    thread = threading.Thread(target=engine.serve_forever)
    thread.start()
    try:
        yield engine
    finally:
        engine.shutdown()
        thread.join()
        engine.server_close()


@pytest.fixture
def engine_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    testcontainers = pytest.importorskip("testcontainers.core.config")
    # Its own clean-up container would have to be played by the stand-in as well.
    monkeypatch.setattr(testcontainers.testcontainers_config, "ryuk_disabled", True)
    monkeypatch.setattr("testcontainers.core.utils.inside_container", lambda: False)
    path = tmp_path / "docker.sock"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    monkeypatch.delenv("ROLLCAST_BOOTSTRAP_SERVERS", raising=False)
    return path


def test_a_docker_engine_that_answers_is_used_and_its_port_is_on_the_loopback_only(engine_path: Path) -> None:
    config = BrokerConfig(properties={"message.max.bytes": "2000"})
    with serving(FakeEngine(engine_path, kafka_comes_up=True)) as engine:
        with running_broker(config) as broker:
            assert broker.kind == "container"
            host, port = broker.bootstrap_servers.split(":")
            assert engine.created["Image"] == "apache/kafka:4.2.1"
            assert engine.created["HostConfig"]["PortBindings"] == {
                "9092/tcp": [{"HostIp": "127.0.0.1", "HostPort": port}]
            }
            assert f"KAFKA_ADVERTISED_LISTENERS=PLAINTEXT://{host}:{port}" in engine.created["Env"]
            assert "KAFKA_MESSAGE_MAX_BYTES=2000" in engine.created["Env"]
            assert not engine.removed.is_set()
        assert engine.removed.is_set()


def test_a_container_whose_kafka_ends_is_removed_and_its_log_is_told(engine_path: Path) -> None:
    with serving(FakeEngine(engine_path, kafka_comes_up=False)) as engine:
        broker = ContainerBroker(BrokerConfig(), report=lambda line: None)
        with pytest.raises(ContainerUnavailableError, match="Kafka ended"):
            broker.start()
        assert engine.removed.is_set()


def test_an_engine_on_another_machine_is_not_used(engine_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://192.0.2.1:2375")
    with pytest.raises(ContainerUnavailableError, match=r"tcp://192\.0\.2\.1:2375"):
        ContainerBroker(BrokerConfig(), report=lambda line: None).start()
    assert os.environ["DOCKER_HOST"] == "tcp://192.0.2.1:2375"
