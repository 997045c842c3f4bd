"""Avro single-object encoding of the events: `C3 01`, the schema's fingerprint, the body."""

import io
import json
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

import fastavro
from fastavro.schema import fingerprint, to_parsing_canonical_form

from rollcast.schemas._bounds import Check, compile_walk
from rollcast.schemas._column_bytes import announced_bytes, column_pieces, columns_array, value_bytes
from rollcast.schemas._values import column_from_avro, column_to_avro, value_from_avro
from rollcast.schemas.errors import DecodeError, EncodeError, LimitError, UnknownSchemaError
from rollcast.schemas.events import (
    Column,
    DeadLetter,
    DpShard,
    DumpCompleted,
    Event,
    MetricPoint,
    PlainValue,
    SamplePart,
    TensorSlice,
)
from rollcast.schemas.limits import DEFAULT_LIMITS, Limits

_MAGIC = b"\xc3\x01"
_HEADER_BYTES = len(_MAGIC) + 8
# What fastavro and the events raise for a body that no writer has made.
_CORRUPT = (ValueError, TypeError, KeyError, IndexError, EOFError, OverflowError)
# What writing an event raises that does not fit its schema.
_UNFIT = (AttributeError, KeyError, OverflowError, TypeError, ValueError)
_EVENT_TYPES: dict[str, type[Any]] = {
    event_type.__name__: event_type for event_type in (SamplePart, DpShard, DumpCompleted, MetricPoint, DeadLetter)
}


@dataclass(frozen=True, slots=True)
class WriterSchema:
    """One released schema of one event.

    Attributes:
        event: name of the event.
        avsc: the schema as it stands in the package.
        parsed: the same, as fastavro wants it.
        header: the frame's first bytes.
        check: the walk that must pass before a body is decoded.
    """

    event: str
    avsc: dict[str, Any]
    parsed: Any
    header: bytes
    check: Check


@cache
def schemas() -> dict[bytes, WriterSchema]:
    """Returns every schema ever released, by frame header; of one event, the newest comes last."""
    found = {}
    folder = resources.files("rollcast.schemas") / "avro"
    for file in sorted(folder.iterdir(), key=lambda file: (file.name.split(".")[0], int(file.name.split(".")[1]))):
        avsc = json.loads(file.read_text())
        parsed = fastavro.parse_schema(avsc)
        header = _MAGIC + bytes.fromhex(fingerprint(to_parsing_canonical_form(parsed), "CRC-64-AVRO"))
        found[header] = WriterSchema(avsc["name"], avsc, parsed, header, compile_walk(avsc))
    return found


@cache
def current_schema(event: str) -> WriterSchema:
    """Returns the schema that this version writes for the event of that name."""
    return [schema for schema in schemas().values() if schema.event == event][-1]


@cache
def _value_schema() -> Any:
    """Returns the parsed schema of `Value`, which is defined inside `SamplePart`."""
    names: dict[str, Any] = {}
    fastavro.parse_schema(current_schema("SamplePart").avsc, names)
    return fastavro.parse_schema(names["rollcast.Value"], names)


def event_to_avro(event: Event) -> dict[str, Any]:
    """Returns the datum of an event, for its current schema."""
    datum = {name: getattr(event, name) for name in type(event).__slots__}
    if isinstance(event, SamplePart):
        datum["columns"] = [column_to_avro(column) for column in event.columns]
    return datum


def event_from_avro(name: str, datum: dict[str, Any]) -> Event:
    """Inverse of `event_to_avro`."""
    if name == "SamplePart":
        datum["columns"] = tuple(column_from_avro(column) for column in datum["columns"])
    elif name == "DpShard":
        datum["slot_digests"] = tuple(datum["slot_digests"])
        datum["part_counts"] = tuple(datum["part_counts"])
    event: Event = _EVENT_TYPES[name](**datum)
    return event


def encode(event: Event) -> bytes:
    """Returns the frame of an event.

    Raises:
        EncodeError: a field does not fit the schema.
    """
    schema = current_schema(type(event).__name__)
    try:
        if not isinstance(event, SamplePart):
            return schema.header + _by_fastavro(schema, event)
        # The columns come last: without any, an array that ends with its first byte.
        head = _by_fastavro(schema, replace(event, columns=()))[:-1]
        return b"".join((schema.header, head, *columns_array(event.columns)))
    except _UNFIT as exc:
        raise EncodeError(f"a {schema.event} does not fit its schema: {exc}") from exc


def decode(frame: bytes, limits: Limits = DEFAULT_LIMITS) -> Event:
    """Returns the event in a frame.

    Raises:
        UnknownSchemaError: the fingerprint is not one of the package's schemas.
        LimitError: it claims more than `limits` allows.
        DecodeError: it is anything else but exactly one event.
    """
    if len(frame) > limits.max_message_bytes:
        raise LimitError("max_message_bytes", len(frame), limits.max_message_bytes)
    header = frame[:_HEADER_BYTES]
    if len(header) < _HEADER_BYTES or header[:2] != _MAGIC:
        raise DecodeError(
            f"the record starts with {frame[:2].hex() or 'nothing'}, not with the Avro single-object marker c301: "
            "another program writes to this topic, or a schema registry is in use on one side only"
        )
    schema = schemas().get(header)
    if schema is None:
        raise UnknownSchemaError(header[2:])
    schema.check(frame, limits, _HEADER_BYTES)
    body = io.BytesIO(frame)
    body.seek(_HEADER_BYTES)
    try:
        datum: Any = fastavro.schemaless_reader(
            body, schema.parsed, current_schema(schema.event).parsed, return_record_name=True
        )
        event = event_from_avro(schema.event, datum)
    except _CORRUPT as exc:
        raise DecodeError(f"the body of a {schema.event} is corrupt: {exc}") from exc
    if isinstance(event, SamplePart):
        _check_columns(event, limits)
    return event


def _check_columns(part: SamplePart, limits: Limits) -> None:
    if (longest := max((len(column.name) for column in part.columns), default=0)) > limits.max_name_chars:
        raise LimitError("max_name_chars", longest, limits.max_name_chars)
    # Leaves are keys of dictionaries; numbers of free choice would make those slow.
    if any(not 0 <= column.leaf <= limits.max_items for column in part.columns):
        raise DecodeError("a column has a leaf that no writer numbers so")
    slices = [column.value for column in part.columns if isinstance(column.value, TensorSlice)]
    if any(piece.slice_bytes < 0 for piece in slices):
        raise DecodeError("a tensor slice has a negative size")
    raw_bytes = sum(piece.slice_bytes for piece in slices)
    if raw_bytes > limits.max_part_raw_bytes:
        raise LimitError("max_part_raw_bytes", raw_bytes, limits.max_part_raw_bytes)


def encode_column(column: Column) -> bytes:
    """Returns the body of a `Column`, unframed.

    Raises:
        EncodeError: a field does not fit the schema.
    """
    try:
        return b"".join(column_pieces(column))
    except _UNFIT as exc:
        raise EncodeError(f"column {column.name!r} does not fit its schema: {exc}") from exc


def encode_announced(column: Column) -> bytes:
    """Returns what a digest takes of a column before the data of its tensor: its body, as of a whole, without data.

    Raises:
        EncodeError: a field does not fit the schema.
    """
    try:
        return announced_bytes(column)
    except _UNFIT as exc:
        raise EncodeError(f"column {column.name!r} does not fit its schema: {exc}") from exc


def encode_value(value: PlainValue) -> bytes:
    """Returns the body of a `Value`, unframed, for a packed column.

    Raises:
        EncodeError: it does not fit the schema.
    """
    try:
        return value_bytes(value)
    except _UNFIT as exc:
        raise EncodeError(f"a value does not fit its schema: {exc}") from exc


@cache
def _value_check() -> Check:
    column = current_schema("SamplePart").avsc["fields"][-1]["type"]["items"]
    return compile_walk(next(field["type"] for field in column["fields"] if field["name"] == "value"), inline=False)


def check_value(body: bytes, limits: Limits = DEFAULT_LIMITS) -> None:
    """Returns if the body is exactly one value within the limits.

    Raises:
        DecodeError: it is not.
    """
    _value_check()(body, limits, 0)


def decode_value(body: bytes, limits: Limits = DEFAULT_LIMITS) -> PlainValue:
    """Inverse of `encode_value`.

    Raises:
        DecodeError: not exactly one value, or one above `limits`.
    """
    check_value(body, limits)
    try:
        datum: Any = fastavro.schemaless_reader(io.BytesIO(body), _value_schema(), None, return_record_name=True)
        return value_from_avro(datum)
    except _CORRUPT as exc:
        raise DecodeError(f"a packed value is corrupt: {exc}") from exc


def _by_fastavro(schema: WriterSchema, event: Event) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, schema.parsed, event_to_avro(event), strict=True)
    return out.getvalue()
