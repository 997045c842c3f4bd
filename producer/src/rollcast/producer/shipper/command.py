"""Flags and environment of `rollcast-ship`."""

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import IO

from rollcast.producer.errors import ProducerError, ShipperError
from rollcast.producer.shipper.config import ShipperConfig
from rollcast.producer.shipper.sidecar import Sidecar
from rollcast.producer.spool.folder import SpoolFolder
from rollcast.schemas.errors import ContractError
from rollcast.schemas.kafka_log import OncePerMinute
from rollcast.schemas.kafka_security import MECHANISMS, PROTOCOLS, KafkaSecurity, read_kafka_security
from rollcast.schemas.topics import Topics

_OWN_TRIES = 5
_OWN_PAUSE_S = 0.1

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


_OTHER_FIELDS = {item.name for item in fields(ShipperConfig)} - {"bootstrap_servers", "topics", "security"}


def run(arguments: Sequence[str] | None) -> int:
    """Ships spools until told to stop; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(OncePerMinute())
    options = _parser().parse_args(arguments)
    try:
        config = ShipperConfig(
            bootstrap_servers=options.bootstrap,
            topics=Topics(options.topic_prefix),
            security=_security(vars(options), os.environ),
            **{name: value for name, value in vars(options).items() if name in _OTHER_FIELDS and value is not None},
        )
        # Refuses files that cannot be read, before anything waits for a broker.
        config.security.client_options()
        with ExitStack() as locks:
            spools = _own_all(options.spool, config.destination, locks)
            if spools:
                asyncio.run(_run(config, spools))
    except (ProducerError, ContractError, ValueError) as exc:
        _say(f"rollcast-ship: {exc}")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rollcast-ship", description="Ships the bundles of spools to Kafka.")
    add = parser.add_argument
    add("--spool", type=Path, action="append", required=True, help="folder that publishers write to; may be repeated")
    add("--bootstrap", default=os.environ.get("ROLLCAST_BOOTSTRAP_SERVERS", ""), help="Kafka's address, host:port")
    add("--topic-prefix", default="rollcast", help="first part of the topic names")
    # From here on, what is not given is left to the defaults of ShipperConfig.
    add("--max-part-bytes", type=int, help="largest record")
    add("--compress-threads", type=int, help="threads that cut and compress")
    add("--create-topics", action=argparse.BooleanOptionalAction, help="create the records topic where it is missing")
    add("--partitions", type=int, help="of a topic that is created")
    add("--replication-factor", type=int, help="of a topic that is created")
    add("--metrics-port", type=int, help="serve Prometheus metrics on this port of 127.0.0.1")
    add("--only-matching-runs", action="store_true", help="ship only runs published for this address and prefix")
    add("--stop-with-trainers", action="store_true", help="end once the spools are empty and no trainer uses them")
    for flag, (variable, words) in _SECURITY_FLAGS.items():
        add(flag, dest=variable, metavar="VALUE", help=f"{words} (also {variable})")
    return parser


def _security(options: Mapping[str, str | None], environment: Mapping[str, str]) -> KafkaSecurity:
    flags = {name: value for name, _ in _SECURITY_FLAGS.values() if (value := options[name]) is not None}
    return read_kafka_security({**environment, **flags})


def _own_all(folders: Sequence[Path], destination: str | None, locks: ExitStack) -> list[tuple[SpoolFolder, IO[bytes]]]:
    """Returns the spools that had no shipper, with their locks, which `locks` closes too."""
    owned = []
    for folder in folders:
        if not folder.is_dir():
            raise ShipperError(f"spool {folder} is no folder; give the spool_dir of the publisher")
        spool = SpoolFolder(folder)
        lock = _own(spool, destination)
        if lock is None:
            _say(f"spool {folder} already has a shipper")
        else:
            owned.append((spool, locks.enter_context(lock)))
    return owned


def _own(spool: SpoolFolder, destination: str | None) -> IO[bytes] | None:
    # A writer that looks for a shipper holds the lock for an instant; that must not pass for one.
    for _ in range(_OWN_TRIES):
        if (lock := spool.try_own(destination)) is not None:
            return lock
        time.sleep(_OWN_PAUSE_S)
    return None


async def _run(config: ShipperConfig, spools: Sequence[tuple[SpoolFolder, IO[bytes]]]) -> None:
    sidecar = Sidecar(config, spools)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        # A second signal ends the process at once; the spool is made for that.
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        sidecar.shutdown()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    await sidecar.run()


def _say(line: str) -> None:
    print(line, file=sys.stderr)  # noqa: T201  # a command's output
