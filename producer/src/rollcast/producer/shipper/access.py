"""Why a broker does not let us in: aiokafka only says that it could not connect."""

import ssl

from aiokafka.conn import create_conn
from aiokafka.errors import (
    AuthenticationFailedError,
    KafkaConnectionError,
    KafkaError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)

from rollcast.producer.errors import ShipperError
from rollcast.producer.shipper.config import ShipperConfig

_ASK_TIMEOUT_MS = 5_000


async def explain(config: ShipperConfig) -> str:
    """Returns why none of the brokers answers, in words; for after a failed connection.

    Raises:
        ShipperError: one answers and refuses, which waiting will not mend.
    """
    reason = "no answer"
    for address in config.bootstrap_servers.split(","):
        host, _, port = address.strip().rpartition(":")
        try:
            connection = await create_conn(
                host, int(port), request_timeout_ms=_ASK_TIMEOUT_MS, **config.security.client_options()
            )
        except UnsupportedSaslMechanismError as exc:
            raise ShipperError(
                f"Kafka at {address} does not offer {config.security.sasl_mechanism}: "
                "set ROLLCAST_SASL_MECHANISM to what its listener has"
            ) from exc
        except ssl.SSLCertVerificationError as exc:
            raise ShipperError(
                f"the certificate of Kafka at {address} is not trusted ({exc.verify_message}): give the certificate of "
                "its authority in ROLLCAST_TLS_CA_FILE, and an address that stands in the certificate"
            ) from exc
        except ssl.SSLError as exc:
            raise ShipperError(
                f"Kafka at {address} does not speak TLS as asked for ({exc.reason}): check ROLLCAST_SECURITY_PROTOCOL, "
                "and ROLLCAST_TLS_CERT_FILE where the brokers ask for a client's certificate"
            ) from exc
        except (SaslAuthenticationFailed, AuthenticationFailedError, ValueError) as exc:
            # Not chained, nor quoted: what an authenticator says may hold what it was given.
            raise ShipperError(
                f"Kafka at {address} does not accept user {config.security.sasl_username!r} with this password "
                f"({type(exc).__name__}): check ROLLCAST_SASL_USERNAME, ROLLCAST_SASL_PASSWORD or "
                "ROLLCAST_SASL_PASSWORD_FILE, and ROLLCAST_SASL_MECHANISM"
            ) from None
        except (KafkaError, OSError) as exc:
            reason = str(exc) or type(exc).__name__
            if isinstance(exc, (ConnectionResetError, KafkaConnectionError)):
                reason += "; it closes the connection: check ROLLCAST_SECURITY_PROTOCOL"
        else:
            connection.close()
    return reason
