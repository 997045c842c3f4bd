"""What a Kafka address speaks, found out without logging in."""

import asyncio
import contextlib
import ssl
import struct
from dataclasses import dataclass

from rollcast.schemas.kafka_security import KafkaSecurity

_SASL_HANDSHAKE, _VERSION = 17, 1
_ILLEGAL_SASL_STATE, _UNSUPPORTED_SASL_MECHANISM = 34, 33
_MAX_ANSWER_BYTES = 16 * 1024
# What comes of a peer that speaks something else, or nothing.
_NO_KAFKA = (OSError, EOFError, TimeoutError, ValueError, struct.error)


@dataclass(frozen=True, kw_only=True, slots=True)
class Listener:
    """A listener of a Kafka broker.

    Attributes:
        tls: it speaks TLS.
        sasl: it asks for a login; None where it does not tell without a client's certificate.
        mechanisms: by which one may log in.
    """

    tls: bool
    sasl: bool | None = None
    mechanisms: tuple[str, ...] = ()

    @property
    def protocol(self) -> str:
        """The value of `ROLLCAST_SECURITY_PROTOCOL` that it takes."""
        if self.sasl is None:
            return "SSL or SASL_SSL"
        return f"{'SASL_' if self.sasl else ''}{'SSL' if self.tls else 'PLAINTEXT'}"


async def find_listener(host: str, port: int, security: KafkaSecurity, timeout_s: float) -> Listener | None:
    """Returns what is there, None where nothing answers as Kafka does; no secret is sent.

    Args:
        host: of the address.
        port: of the address.
        security: a client's certificate is shown where one is configured.
        timeout_s: longest wait for each of the two tries, in the clear and over TLS.
    """
    for context in (None, _trusting_context(security)):
        with contextlib.suppress(*_NO_KAFKA):
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_connection(host, port, ssl=context)
                try:
                    return await _ask(reader, writer, security.sasl_mechanism or "PLAIN")
                except _NO_KAFKA:
                    # Whoever shakes hands over TLS speaks it, also where it then wants a certificate that is not there.
                    if context is not None:
                        return Listener(tls=True)
                finally:
                    # Not closed in order: TLS would wait for the other side.
                    writer.transport.abort()
                    with contextlib.suppress(*_NO_KAFKA):
                        await writer.wait_closed()
    return None


def _trusting_context(security: KafkaSecurity) -> ssl.SSLContext:
    """Returns a context that takes any certificate: nothing is sent over it that anybody may not see."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if security.tls_cert_file is not None:
        with contextlib.suppress(OSError):
            context.load_cert_chain(security.tls_cert_file, security.tls_key_file, password="")
    return context


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, mechanism: str) -> Listener:
    """Begins a SASL handshake, which each kind of listener answers in its own way.

    Raises:
        ValueError: the answer is not Kafka's.
        EOFError: there is none.
    """
    body = struct.pack(">hhih", _SASL_HANDSHAKE, _VERSION, 0, -1) + struct.pack(">h", len(mechanism))
    body += mechanism.encode()
    writer.write(struct.pack(">i", len(body)) + body)
    await writer.drain()
    (size,) = struct.unpack(">i", await reader.readexactly(4))
    if not 10 <= size <= _MAX_ANSWER_BYTES:
        raise ValueError(f"an answer of {size} bytes is no answer of Kafka")
    answer = await reader.readexactly(size)
    _, error, count = struct.unpack_from(">ihi", answer)
    if error not in (0, _ILLEGAL_SASL_STATE, _UNSUPPORTED_SASL_MECHANISM):
        raise ValueError(f"Kafka answers a handshake with error {error}")
    tls = writer.get_extra_info("ssl_object") is not None
    if error == _ILLEGAL_SASL_STATE:
        return Listener(tls=tls, sasl=False)
    mechanisms: list[str] = []
    at = 10
    while len(mechanisms) < count:
        (length,) = struct.unpack_from(">h", answer, at)
        mechanisms.append(answer[at + 2 : at + 2 + length].decode())
        at += 2 + max(length, 0)
    return Listener(tls=tls, sasl=True, mechanisms=tuple(mechanisms))
