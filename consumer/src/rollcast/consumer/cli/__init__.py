"""The `rollcast` command, as far as it works with no extra installed: it says which one is missing."""

import os
import sys

from rollcast.consumer.errors import ConsumerError, ShutdownTimeoutError
from rollcast.schemas import ContractError
from rollcast.schemas.install import install_command

__all__ = ["main"]

_OF_EXTRAS = ("aiohttp", "aiokafka", "cramjam", "isal", "prometheus_client", "rich", "torch", "typer")
_SUBCOMMANDS = ("consume", "inspect", "diff", "verify", "rebuild", "broker")


def main() -> None:
    """Runs the command; an error of ours and a missing extra are one sentence on stderr, and exit status 2."""
    try:
        from rollcast.consumer.cli.command import app

        app()
    except (ConsumerError, ContractError) as exc:
        print(f"rollcast: {exc}", file=sys.stderr)  # noqa: T201 - the command's own output
        if isinstance(exc, ShutdownTimeoutError):
            # A thread may hang in a write; the interpreter would wait for it.
            sys.stderr.flush()
            os._exit(2)
        sys.exit(2)
    except ModuleNotFoundError as exc:
        package = (exc.name or "").partition(".")[0]
        if package not in _OF_EXTRAS:
            raise
        print(_missing(package, sys.argv[1:]), file=sys.stderr)  # noqa: T201 - the command's own output
        sys.exit(2)


def _missing(package: str, arguments: list[str]) -> str:
    """Returns what is missing for the command that these arguments call, and the remedy."""
    subcommand = arguments[0] if arguments and arguments[0] in _SUBCOMMANDS else None
    extra = "broker" if subcommand == "broker" else "consumer"
    name = f"rollcast {subcommand}" if subcommand else "rollcast"
    return f"{name} needs {package}: {install_command(extra)}"
