"""Security settings: what contradicts itself is refused, and no secret is ever shown."""

from typing import Any

import pytest

from rollcast.schemas import ContractError
from rollcast.schemas.kafka_security import KafkaSecurity, KafkaSecurityError, read_kafka_security

_LOGIN = {
    "ROLLCAST_SECURITY_PROTOCOL": "sasl_plaintext",
    "ROLLCAST_SASL_MECHANISM": "SCRAM-SHA-256",
    "ROLLCAST_SASL_USERNAME": "u",
    "ROLLCAST_SASL_PASSWORD": "a-secret",
}


def test_without_settings_a_client_speaks_plain_tcp() -> None:
    assert read_kafka_security({"HOME": "x", "ROLLCAST_SASL_MECHANISM": ""}) == KafkaSecurity()
    assert KafkaSecurity().client_options() == {"security_protocol": "PLAINTEXT"}


def test_settings_become_the_arguments_of_a_client() -> None:
    assert read_kafka_security(_LOGIN).client_options() == {
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "SCRAM-SHA-256",
        "sasl_plain_username": "u",
        "sasl_plain_password": "a-secret",
    }


def test_a_password_is_in_no_repr() -> None:
    assert "a-secret" not in repr(read_kafka_security(_LOGIN))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ROLLCAST_SECURITY_PROTOCOL": "TLS"}, "must be one of PLAINTEXT, SSL"),
        ({"ROLLCAST_SECURITY_PROTOCOL": ""}, "ROLLCAST_SASL_MECHANISM is set, but"),
        ({"ROLLCAST_SASL_MECHANISM": "GSSAPI"}, "must be one of PLAIN, SCRAM-SHA-256"),
        ({"ROLLCAST_SASL_MECHANISM": ""}, "set ROLLCAST_SASL_MECHANISM too"),
        ({"ROLLCAST_SASL_USERNAME": ""}, "set ROLLCAST_SASL_USERNAME too"),
        ({"ROLLCAST_SASL_PASSWORD": ""}, "set ROLLCAST_SASL_PASSWORD too"),
        ({"ROLLCAST_TLS_CA_FILE": "ca.pem"}, "set it to SASL_SSL"),
        ({"ROLLCAST_SASL_PASSWORD_FILE": "f"}, "not both"),
        ({"ROLLCAST_SASL_PASSWORD": "", "ROLLCAST_SASL_PASSWORD_FILE": "/nonexistent"}, "cannot be read"),
        ({"ROLLCAST_SECURITY_PROTOCOL": "SASL_SSL", "ROLLCAST_TLS_KEY_FILE": "k"}, "set ROLLCAST_TLS_CERT_FILE too"),
    ],
)
def test_settings_that_cannot_work_are_refused_without_telling_the_secret(change: dict[str, str], words: str) -> None:
    with pytest.raises(KafkaSecurityError, match=words) as refused:
        read_kafka_security(_LOGIN | change)
    assert isinstance(refused.value, ContractError)
    assert "a-secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tls_ca_file": "/nonexistent/ca.pem"}, "ROLLCAST_TLS_CA_FILE is /nonexistent/ca.pem"),
        ({"tls_cert_file": "/nonexistent/c.pem"}, "ROLLCAST_TLS_CERT_FILE is /nonexistent/c.pem"),
    ],
)
def test_files_that_cannot_be_read_are_named(files: dict[str, Any], words: str) -> None:
    with pytest.raises(KafkaSecurityError, match=words):
        KafkaSecurity(protocol="SSL", **files).client_options()
