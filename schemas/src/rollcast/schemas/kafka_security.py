"""How every Kafka client of Rollcast logs in: SASL and TLS settings, and where they are read from."""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollcast.schemas.errors import ContractError

PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_MAX_PASSWORD_FILE_BYTES = 64 * 1024


class KafkaSecurityError(ContractError):
    """A security setting cannot work; the message names the variable that sets it, never its secret."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KafkaSecurity:
    """Security settings of a Kafka client; plain TCP by default.

    Attributes:
        protocol: one of `PROTOCOLS`.
        sasl_mechanism: one of `MECHANISMS`; for the SASL protocols.
        sasl_username: the user.
        sasl_password: its password; in no repr.
        tls_ca_file: certificates that vouch for the brokers; None: the system's.
        tls_cert_file: certificate of this client, where brokers ask for one.
        tls_key_file: its key, without a passphrase; None: it stands in the file of the certificate.
    """

    protocol: str = "PLAINTEXT"
    sasl_mechanism: str | None = None
    sasl_username: str | None = None
    sasl_password: str | None = field(default=None, repr=False)
    tls_ca_file: Path | None = None
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None

    def __post_init__(self) -> None:
        """Refuses settings that contradict each other, above all secrets that a protocol would not protect or use."""
        if self.protocol not in PROTOCOLS:
            raise KafkaSecurityError(
                f"ROLLCAST_SECURITY_PROTOCOL is {self.protocol!r}; it must be one of {', '.join(PROTOCOLS)}"
            )
        sasl = {
            "ROLLCAST_SASL_MECHANISM": self.sasl_mechanism,
            "ROLLCAST_SASL_USERNAME": self.sasl_username,
            "ROLLCAST_SASL_PASSWORD": self.sasl_password,
        }
        for name, value in sasl.items():
            if self._has_sasl and not value:
                raise KafkaSecurityError(f"ROLLCAST_SECURITY_PROTOCOL is {self.protocol}: set {name} too")
            if not self._has_sasl and value:
                raise KafkaSecurityError(
                    f"{name} is set, but ROLLCAST_SECURITY_PROTOCOL is {self.protocol}; set it to SASL_SSL"
                )
        if self._has_sasl and self.sasl_mechanism not in MECHANISMS:
            raise KafkaSecurityError(
                f"ROLLCAST_SASL_MECHANISM is {self.sasl_mechanism!r}; it must be one of {', '.join(MECHANISMS)}"
            )
        if not self._has_tls and (self.tls_ca_file or self.tls_cert_file or self.tls_key_file):
            raise KafkaSecurityError(
                f"ROLLCAST_TLS_* files are set, but ROLLCAST_SECURITY_PROTOCOL is {self.protocol}; "
                f"set it to {'SASL_SSL' if self._has_sasl else 'SSL'}"
            )
        if self.tls_key_file and not self.tls_cert_file:
            raise KafkaSecurityError("ROLLCAST_TLS_KEY_FILE is set: set ROLLCAST_TLS_CERT_FILE too")

    @property
    def _has_sasl(self) -> bool:
        return self.protocol.startswith("SASL_")

    @property
    def _has_tls(self) -> bool:
        return self.protocol.endswith("SSL")

    def client_options(self) -> dict[str, Any]:
        """Returns the keyword arguments that aiokafka's clients take for these settings.

        Raises:
            KafkaSecurityError: a file cannot be read or is not what it should be.
        """
        options: dict[str, Any] = {"security_protocol": self.protocol}
        if self._has_sasl:
            options |= {
                "sasl_mechanism": self.sasl_mechanism,
                "sasl_plain_username": self.sasl_username,
                "sasl_plain_password": self.sasl_password,
            }
        if self._has_tls:
            options["ssl_context"] = self._ssl_context()
        return options

    def _ssl_context(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self.tls_ca_file)
        except (OSError, ssl.SSLError) as exc:
            raise KafkaSecurityError(
                f"ROLLCAST_TLS_CA_FILE is {self.tls_ca_file}, which holds no readable PEM certificates: {exc}"
            ) from exc
        if self.tls_cert_file:
            try:
                # The empty password makes an encrypted key an error; without one, OpenSSL asks at the terminal.
                context.load_cert_chain(self.tls_cert_file, self.tls_key_file, password="")
            except (OSError, ssl.SSLError) as exc:
                raise KafkaSecurityError(
                    f"ROLLCAST_TLS_CERT_FILE is {self.tls_cert_file} and ROLLCAST_TLS_KEY_FILE {self.tls_key_file}, "
                    f"which are no PEM certificate with its unencrypted key: {exc}"
                ) from exc
        return context


def read_kafka_security(environment: Mapping[str, str]) -> KafkaSecurity:
    """Returns the settings in `ROLLCAST_SECURITY_PROTOCOL` and the `ROLLCAST_SASL_*` and `ROLLCAST_TLS_*` variables.

    `ROLLCAST_SASL_PASSWORD_FILE` names a file with the password, for where the environment is not secret enough.

    Raises:
        KafkaSecurityError: they cannot work, or the file cannot be read.
    """

    def path(name: str) -> Path | None:
        return Path(value) if (value := environment.get(name)) else None

    password = environment.get("ROLLCAST_SASL_PASSWORD") or None
    if (password_file := path("ROLLCAST_SASL_PASSWORD_FILE")) is not None:
        if password is not None:
            raise KafkaSecurityError("set ROLLCAST_SASL_PASSWORD or ROLLCAST_SASL_PASSWORD_FILE, not both")
        password = _password_in(password_file)
    return KafkaSecurity(
        protocol=(environment.get("ROLLCAST_SECURITY_PROTOCOL") or "PLAINTEXT").upper(),
        sasl_mechanism=environment.get("ROLLCAST_SASL_MECHANISM") or None,
        sasl_username=environment.get("ROLLCAST_SASL_USERNAME") or None,
        sasl_password=password,
        tls_ca_file=path("ROLLCAST_TLS_CA_FILE"),
        tls_cert_file=path("ROLLCAST_TLS_CERT_FILE"),
        tls_key_file=path("ROLLCAST_TLS_KEY_FILE"),
    )


def _password_in(path: Path) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_PASSWORD_FILE_BYTES).decode().strip("\r\n")
    except (OSError, UnicodeDecodeError) as exc:
        # Not chained: a UnicodeDecodeError carries the bytes.
        raise KafkaSecurityError(
            f"ROLLCAST_SASL_PASSWORD_FILE is {path}, which cannot be read as text ({type(exc).__name__})"
        ) from None
    if not text:
        raise KafkaSecurityError(f"ROLLCAST_SASL_PASSWORD_FILE is {path}, which is empty")
    return text
