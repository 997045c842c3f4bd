"""The command `rollcast-ship`, as far as it works with a package missing: it says which one."""

import sys
from collections.abc import Sequence

from rollcast.producer.missing import sentence_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Ships spools until told to stop; returns the exit status."""
    try:
        from rollcast.producer.shipper.command import run
    except ModuleNotFoundError as exc:
        if (sentence := sentence_of(exc, "rollcast-ship")) is None:
            raise
        print(sentence, file=sys.stderr)  # noqa: T201
        return 2
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
