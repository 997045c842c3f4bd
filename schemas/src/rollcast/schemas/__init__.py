"""The contracts of Rollcast: events on the wire, and the v2 train dump.

Names that need torch are loaded on first use, so that a process which only moves bytes need not import it.
"""

from typing import TYPE_CHECKING, Any

from rollcast.schemas.errors import (
    ContractError,
    DecodeError,
    EncodeError,
    LimitError,
    RolloutDataError,
    ShardContentError,
    UnknownSchemaError,
)
from rollcast.schemas.events import (
    SHARD_SLOT,
    TRAIN_STREAM,
    Column,
    DeadLetter,
    DpShard,
    DumpCompleted,
    Event,
    MetricPoint,
    SamplePart,
    TensorRef,
    TensorSlice,
)
from rollcast.schemas.framing import decode, encode
from rollcast.schemas.limits import DEFAULT_LIMITS, DEFAULT_MAX_PART_BYTES, Limits
from rollcast.schemas.topics import Topics, file_name_for, record_key

if TYPE_CHECKING:
    from rollcast.schemas.payload import build_dump_payload

__all__ = [
    "DEFAULT_LIMITS",
    "DEFAULT_MAX_PART_BYTES",
    "SHARD_SLOT",
    "TRAIN_STREAM",
    "Column",
    "ContractError",
    "DeadLetter",
    "DecodeError",
    "DpShard",
    "DumpCompleted",
    "EncodeError",
    "Event",
    "LimitError",
    "Limits",
    "MetricPoint",
    "RolloutDataError",
    "SamplePart",
    "ShardContentError",
    "TensorRef",
    "TensorSlice",
    "Topics",
    "UnknownSchemaError",
    "build_dump_payload",
    "decode",
    "encode",
    "file_name_for",
    "record_key",
]


def __getattr__(name: str) -> Any:
    if name == "build_dump_payload":
        from rollcast.schemas.payload import build_dump_payload

        return build_dump_payload
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
