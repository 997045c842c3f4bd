"""The command `rollcast-ship`."""

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from rollcast.producer.errors import ProducerError, ShipperError
from rollcast.producer.shipper.config import ShipperConfig
from rollcast.producer.shipper.shipper import Shipper
from rollcast.producer.spool.folder import SpoolFolder
from rollcast.schemas.errors import ContractError
from rollcast.schemas.limits import DEFAULT_MAX_PART_BYTES
from rollcast.schemas.topics import Topics

_OWN_TRIES = 5
_OWN_PAUSE_S = 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    """Ships a spool until told to stop; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    options = _parser().parse_args(arguments)
    try:
        config = ShipperConfig(
            spool_dir=options.spool,
            bootstrap_servers=options.bootstrap,
            topics=Topics(options.topic_prefix),
            max_part_bytes=options.max_part_bytes,
            only_matching_runs=options.only_matching_runs,
            stop_with_trainers=options.stop_with_trainers,
        )
        if not config.spool_dir.is_dir():
            raise ShipperError(f"spool {config.spool_dir} is no folder; give the spool_dir of the publisher")
        spool = SpoolFolder(config.spool_dir)
        lock = _own(spool, config.destination)
        if lock is None:
            print(f"spool {config.spool_dir} already has a shipper", file=sys.stderr)  # noqa: T201  # a command's output
            return 0
        with lock:
            asyncio.run(_run(Shipper(spool, config)))
    except (ProducerError, ContractError, ValueError) as exc:
        print(f"rollcast-ship: {exc}", file=sys.stderr)  # noqa: T201  # a command's output
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rollcast-ship", description="Ships the bundles of a spool to Kafka.")
    parser.add_argument("--spool", type=Path, required=True, help="folder that the publisher writes to")
    parser.add_argument(
        "--bootstrap", default=os.environ.get("ROLLCAST_BOOTSTRAP_SERVERS", ""), help="Kafka's address, host:port"
    )
    parser.add_argument("--topic-prefix", default="rollcast", help="first part of the topic names")
    parser.add_argument("--max-part-bytes", type=int, default=DEFAULT_MAX_PART_BYTES, help="largest record")
    parser.add_argument(
        "--only-matching-runs", action="store_true", help="ship only runs published for this address and prefix"
    )
    parser.add_argument(
        "--stop-with-trainers", action="store_true", help="end once the spool is empty and no trainer uses it"
    )
    return parser


def _own(spool: SpoolFolder, destination: str | None) -> IO[bytes] | None:
    # A writer that looks for a shipper holds the lock for an instant; that must not pass for one.
    for _ in range(_OWN_TRIES):
        if (lock := spool.try_own(destination)) is not None:
            return lock
        time.sleep(_OWN_PAUSE_S)
    return None


async def _run(shipper: Shipper) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        # A second signal ends the process at once; the spool is made for that.
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        shipper.shutdown()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    await shipper.run()


if __name__ == "__main__":
    sys.exit(main())
