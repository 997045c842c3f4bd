"""Ports on the loopback address: finding free ones, and asking whether a Kafka answers on one."""

from __future__ import annotations

import random
import socket
import struct
from typing import Final

from rollcast.consumer.broker._config import LOOPBACK

# Below the range from which Linux takes the ports of outgoing connections (32768 and up): a client that knocks
# at the port of a killed broker must not be given that very port, or the broker could not come back to it.
_CANDIDATES: Final = range(15_000, 32_768)
_TRIES: Final = 200
_PROBE_TIMEOUT_S: Final = 2.0
_METADATA: Final = 3
_METADATA_VERSION: Final = 1
_CORRELATION: Final = 7


def port_is_free(port: int) -> bool:
    """Tells whether a server could listen on this loopback port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As Java does: connections of an earlier broker that are still winding down are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def free_ports(count: int) -> list[int]:
    """Returns different loopback ports on which nobody listens.

    Raises:
        OSError: so many ports are taken that none was found.
    """
    candidates = random.sample(_CANDIDATES, _TRIES)
    ports = [port for port in candidates if port_is_free(port)][:count]
    if len(ports) < count:
        raise OSError(f"fewer than {count} of {_TRIES} loopback ports tried are free")
    return ports


def kafka_answers(port: int, host: str = LOOPBACK) -> bool:
    """Tells whether the Kafka on this port lists a live broker in its answer to a metadata request.

    Written by hand because the caller may be inside a running event loop, where asyncio clients cannot be
    driven, and because the `broker` extra has no Kafka client. Request and answer are those of Metadata
    version 1 in the Kafka protocol guide: no topics asked for; the answer begins with the array of brokers.
    """
    body = struct.pack(">hhihi", _METADATA, _METADATA_VERSION, _CORRELATION, -1, 0)
    try:
        with socket.create_connection((host, port), timeout=_PROBE_TIMEOUT_S) as connection:
            connection.sendall(struct.pack(">i", len(body)) + body)
            with connection.makefile("rb") as answer:
                head = answer.read(12)
    except OSError:
        return False
    if len(head) < 12:
        return False
    _size, correlation, broker_count = struct.unpack(">iii", head)
    return bool(correlation == _CORRELATION and broker_count > 0)
