"""The command `rollcast-ship`, as far as it works with a package missing: it says which one."""

import sys
from collections.abc import Sequence

_OF_EXTRAS = ("aiokafka", "fastavro", "numpy", "prometheus_client", "xxhash", "zstandard")


def main(arguments: Sequence[str] | None = None) -> int:
    """Ships spools until told to stop; returns the exit status."""
    try:
        from rollcast.producer.shipper.command import run
    except ModuleNotFoundError as exc:
        package = (exc.name or "").partition(".")[0]
        if package not in _OF_EXTRAS:
            raise
        # Among them is zstd's: without it no part could be compressed.
        # Not by way of rollcast.schemas, which needs some of them itself.
        remedy = "pip install -c constraints.txt '.[producer]' in a clone of Rollcast"
        print(f"rollcast-ship needs {package}: {remedy}", file=sys.stderr)  # noqa: T201
        return 2
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
