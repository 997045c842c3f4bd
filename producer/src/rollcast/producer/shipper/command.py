"""Flags and environment of `rollcast-ship`."""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

from rollcast.producer.errors import ProducerError, ShipperRefusedError
from rollcast.producer.shipper.config import ShipperConfig
from rollcast.producer.shipper.sidecar import Sidecar
from rollcast.schemas.allocator import keep_freed_memory
from rollcast.schemas.errors import ContractError
from rollcast.schemas.kafka_log import client_log_shown_after, hide_client_log
from rollcast.schemas.kafka_security import MECHANISMS, PROTOCOLS, KafkaSecurity, read_kafka_security
from rollcast.schemas.topics import Topics

UNUSABLE, REFUSED = 2, 3
"""Exit statuses: a setting or a spool cannot be used; Kafka refuses us or has no such topic."""

_log = logging.getLogger("rollcast.ship")

# What is not secret may also be a flag, which wins. A password never is: command lines are public.
_SECURITY_FLAGS = {
    "--security-protocol": ("ROLLCAST_SECURITY_PROTOCOL", ", ".join(PROTOCOLS)),
    "--sasl-mechanism": ("ROLLCAST_SASL_MECHANISM", ", ".join(MECHANISMS)),
    "--sasl-username": ("ROLLCAST_SASL_USERNAME", "user; the password is read from ROLLCAST_SASL_PASSWORD"),
    "--sasl-password-file": ("ROLLCAST_SASL_PASSWORD_FILE", "or from this file"),
    "--tls-ca-file": ("ROLLCAST_TLS_CA_FILE", "PEM file that vouches for the brokers; default: the system's"),
    "--tls-cert-file": ("ROLLCAST_TLS_CERT_FILE", "PEM certificate of this client"),
    "--tls-key-file": ("ROLLCAST_TLS_KEY_FILE", "PEM key of this client"),
}

_NUMBER_FLAGS = {
    "--max-part-bytes": "largest record",
    "--compress-threads": "threads that cut and compress",
    "--partitions": "of a topic that is created",
    "--replication-factor": "of a topic that is created",
}
_OTHER_FIELDS = {item.name for item in fields(ShipperConfig)} - {"bootstrap_servers", "topics", "security"}


def run(arguments: Sequence[str] | None) -> int:
    """Ships spools until told to stop; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    hide_client_log()
    options = _parser().parse_args(arguments)
    keep_freed_memory()
    try:
        config = ShipperConfig(
            bootstrap_servers=options.bootstrap,
            topics=Topics(options.topic_prefix),
            security=_security(vars(options), os.environ),
            **{name: value for name, value in vars(options).items() if name in _OTHER_FIELDS},
        )
        # Refuses files that cannot be read, before anything waits for a broker.
        config.security.client_options()
        asyncio.run(_run(config, options.spool))
    except (ProducerError, ContractError, ValueError) as exc:
        print(f"rollcast-ship: {exc}", file=sys.stderr)  # noqa: T201  # a command's output
        return REFUSED if isinstance(exc, ShipperRefusedError) else UNUSABLE
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rollcast-ship",
        description="Ships the bundles of spools to Kafka, until told to stop (SIGTERM, Ctrl-C).",
        epilog=f"Exit status: 0 told to stop, or done; {UNUSABLE} a setting or a spool cannot be used; {REFUSED} Kafka "
        "refuses the login, or has no such topic and may not create it. What is not shipped waits in its spool.",
    )
    add = parser.add_argument
    add(
        "--version",
        action="version",
        version=f"%(prog)s {version('rollcast')}",
        help="show the version and exit",
    )
    add(
        "--spool",
        type=Path,
        action="append",
        required=True,
        help="folder that publishers write to; may be repeated, and need not be there yet",
    )
    add(
        "--bootstrap",
        default=os.environ.get("ROLLCAST_BOOTSTRAP_SERVERS", ""),
        help="Kafka's address, host:port (also ROLLCAST_BOOTSTRAP_SERVERS)",
    )
    add("--topic-prefix", default="rollcast", help="first part of the topic names (default: %(default)s)")
    for flag, words in _NUMBER_FLAGS.items():
        add(flag, type=int, default=_default(flag), help=f"{words} (default: %(default)s)")
    add(
        "--create-topics",
        action=argparse.BooleanOptionalAction,
        default=_default("--create-topics"),
        help="create the records topic where it is missing (default: --create-topics)",
    )
    add("--metrics-port", type=int, help="serve /metrics, /healthz and /readyz here; 0: any free port (default: none)")
    add("--metrics-host", default=_default("--metrics-host"), help="address to serve them at (default: %(default)s)")
    add("--only-matching-runs", action="store_true", help="ship only runs published for this address and prefix")
    add("--stop-with-trainers", action="store_true", help="end once the spools are empty and no trainer uses them")
    for flag, (variable, words) in _SECURITY_FLAGS.items():
        add(flag, dest=variable, metavar="VALUE", help=f"{words} (also {variable})")
    return parser


def _default(flag: str) -> object:
    return next(item.default for item in fields(ShipperConfig) if item.name == flag.strip("-").replace("-", "_"))


def _security(options: Mapping[str, str | None], environment: Mapping[str, str]) -> KafkaSecurity:
    flags = {name: value for name, _ in _SECURITY_FLAGS.values() if (value := options[name]) is not None}
    return read_kafka_security({**environment, **flags})


async def _run(config: ShipperConfig, folders: Sequence[Path]) -> None:
    sidecar = Sidecar(config, folders)
    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        _log.info("%s: stopping", number.name)
        # A second signal ends the process at once; the spool is made for that.
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        sidecar.shutdown()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    async with client_log_shown_after(sidecar.found):
        await sidecar.run()
