"""What answers at an address may be anything: it is told apart from Kafka, within a bound, and believed nothing."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rollcast.schemas.kafka_access import explain
from rollcast.schemas.kafka_listener import Listener, find_listener
from rollcast.schemas.kafka_security import KafkaSecurity


@asynccontextmanager
async def _answering(answer: bytes | None) -> AsyncIterator[int]:
    """Yields the port of somebody who says the same to everybody; None: who takes connections and says nothing."""
    connections: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        await reader.read(1)
        if answer is not None:
            writer.write(answer)
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
        for writer in connections:
            writer.transport.abort()


def _answer(error: int, *mechanisms: bytes, count: int | None = None) -> bytes:
    body = struct.pack(">ihi", 0, error, len(mechanisms) if count is None else count)
    body += b"".join(struct.pack(">h", len(name)) + name for name in mechanisms)
    return struct.pack(">i", len(body)) + body


@pytest.mark.parametrize(
    "answer",
    [
        None,
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x15\x03\x03\x00\x02\x02\x50",
        struct.pack(">i", 2**31 - 1),
        struct.pack(">i", -1),
        struct.pack(">i", 9) + bytes(9),
        _answer(35),
        _answer(0, b"PLAIN", count=2**31 - 1),
        _answer(0, b"\xff\xff"),
        _answer(33, b"PLAIN")[:-1],
    ],
)
async def test_what_is_not_kafka_is_no_listener(answer: bytes | None) -> None:
    async with _answering(answer) as port:
        assert await find_listener("127.0.0.1", port, KafkaSecurity(), timeout_s=0.3) is None


async def test_an_empty_address_is_no_listener() -> None:
    assert await find_listener("127.0.0.1", 1, KafkaSecurity(), timeout_s=0.3) is None


@pytest.mark.parametrize(
    ("answer", "listener"),
    [
        (_answer(34), Listener(tls=False, sasl=False)),
        (_answer(0, b"PLAIN", b"GSSAPI"), Listener(tls=False, sasl=True, mechanisms=("PLAIN", "GSSAPI"))),
        (_answer(33, b"GSSAPI"), Listener(tls=False, sasl=True, mechanisms=("GSSAPI",))),
    ],
)
async def test_a_handshake_tells_what_a_listener_asks_for(answer: bytes, listener: Listener) -> None:
    async with _answering(answer) as port:
        assert await find_listener("127.0.0.1", port, KafkaSecurity(), timeout_s=5) == listener


async def test_something_else_at_the_address_is_waited_for_with_a_hint() -> None:
    async with _answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        assert f"is it Kafka that answers at 127.0.0.1:{port}" in await explain(f"127.0.0.1:{port}", KafkaSecurity())
