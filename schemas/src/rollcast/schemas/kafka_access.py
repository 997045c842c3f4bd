"""Why Kafka does not let a client in: aiokafka only says that it could not connect. Needs aiokafka."""

import ssl

from aiokafka.conn import collect_hosts, create_conn
from aiokafka.errors import AuthenticationFailedError, KafkaConnectionError, KafkaError, SaslAuthenticationFailed

from rollcast.schemas.errors import ContractError
from rollcast.schemas.kafka_listener import Listener, find_listener
from rollcast.schemas.kafka_security import KafkaSecurity

_ASK_TIMEOUT_S = 5.0


class KafkaRefusedError(ContractError):
    """A broker answers and refuses the settings, which waiting will not mend; the message says what to change."""


async def explain(bootstrap_servers: str, security: KafkaSecurity) -> str:
    """Returns why none of the brokers lets a client in, in words; for after a failed connection.

    Raises:
        KafkaRefusedError: one answers and refuses.
        ValueError: an address is none.
    """
    reason = "no answer"
    for host, port, _ in collect_hosts(bootstrap_servers, randomize=False):
        address = f"{host}:{port}"
        listener = await find_listener(host, port, security, _ASK_TIMEOUT_S)
        if listener is not None:
            _compare(address, listener, security)
        try:
            connection = await create_conn(
                host, port, request_timeout_ms=int(_ASK_TIMEOUT_S * 1000), **security.client_options()
            )
        except ssl.SSLCertVerificationError as exc:
            raise KafkaRefusedError(
                f"the certificate of Kafka at {address} is not trusted ({exc.verify_message}): give the certificate of "
                "its authority in ROLLCAST_TLS_CA_FILE, and an address that stands in the certificate"
            ) from exc
        except ssl.SSLError as exc:
            raise KafkaRefusedError(
                f"Kafka at {address} does not speak TLS as asked for ({exc.reason}): check ROLLCAST_SECURITY_PROTOCOL, "
                "and ROLLCAST_TLS_CERT_FILE where the brokers ask for a client's certificate"
            ) from exc
        except (SaslAuthenticationFailed, AuthenticationFailedError, ValueError) as exc:
            if security.sasl_mechanism is None:
                reason = f"{address} answers what is not Kafka's"
                continue
            # Not chained, nor quoted: what an authenticator says may hold what it was given.
            raise KafkaRefusedError(
                f"Kafka at {address} does not accept user {security.sasl_username!r} with this password "
                f"({type(exc).__name__}): check ROLLCAST_SASL_USERNAME, ROLLCAST_SASL_PASSWORD or "
                "ROLLCAST_SASL_PASSWORD_FILE, and ROLLCAST_SASL_MECHANISM"
            ) from None
        except (KafkaError, OSError) as exc:
            reason = str(exc) or type(exc).__name__
            if listener is None and isinstance(exc, (ConnectionResetError, KafkaConnectionError)):
                reason += f"; is it Kafka that answers at {address}, and ROLLCAST_SECURITY_PROTOCOL what it speaks?"
        else:
            connection.close()
    return reason


def _compare(address: str, listener: Listener, security: KafkaSecurity) -> None:
    """Returns if the settings are for such a listener.

    Raises:
        KafkaRefusedError: they are not.
    """
    if security.protocol not in listener.protocol.split(" or "):
        raise KafkaRefusedError(
            f"Kafka at {address} speaks {listener.protocol}, and {security.protocol} was tried: set "
            f"ROLLCAST_SECURITY_PROTOCOL to {listener.protocol}{_with(listener)}, or give the address of its "
            f"{security.protocol} listener"
        )
    if listener.sasl and security.sasl_mechanism not in listener.mechanisms:
        raise KafkaRefusedError(
            f"Kafka at {address} does not offer {security.sasl_mechanism}: set ROLLCAST_SASL_MECHANISM to what its "
            f"listener has, {' or '.join(listener.mechanisms)}"
        )


def _with(listener: Listener) -> str:
    more = []
    if listener.sasl:
        more.append(f"ROLLCAST_SASL_MECHANISM to {' or '.join(listener.mechanisms)}, with user and password")
    if listener.tls:
        more.append("ROLLCAST_TLS_CA_FILE where its certificate is not of a public authority")
    return "".join(f", {words}" for words in more)
