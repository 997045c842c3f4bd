"""The consumer of Rollcast: records to verified dumps and metrics.

Names that need Kafka, torch or numpy are loaded on first use.
"""

from typing import TYPE_CHECKING, Any

from rollcast.consumer.config import ConsumeConfig
from rollcast.consumer.errors import ConsumerError

if TYPE_CHECKING:
    from rollcast.consumer.assembler import Assembler
    from rollcast.consumer.daemon import Daemon
    from rollcast.consumer.difference import Difference, differences
    from rollcast.consumer.store import LocalDumpStore

__all__ = ["Assembler", "ConsumeConfig", "ConsumerError", "Daemon", "Difference", "LocalDumpStore", "differences"]

_LAZY = {
    "Assembler": "assembler",
    "Daemon": "daemon",
    "Difference": "difference",
    "LocalDumpStore": "store",
    "differences": "difference",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f"rollcast.consumer.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
