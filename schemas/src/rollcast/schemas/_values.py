"""Columns to the datum that fastavro writes, and back."""

from collections.abc import Sequence
from typing import Any

from rollcast.schemas.events import Column, PlainValue, TensorRef, TensorSlice
from rollcast.schemas.limits import MAX_NUMBER_KEYS

_LIST, _TUPLE, _MAP = "rollcast.List", "rollcast.Tuple", "rollcast.Map"
_REF, _SLICE = "rollcast.TensorRef", "rollcast.TensorSlice"
_PRIMITIVES = {bool: "boolean", int: "long", float: "double", str: "string", bytes: "bytes"}


def column_to_avro(column: Column) -> dict[str, Any]:
    """Returns the datum of a `Column`.

    Raises:
        TypeError: a value that `tensors.normalise` would have replaced.
    """
    return {"name": column.name, "leaf": column.leaf, "value": value_to_avro(column.value)}


def column_from_avro(datum: dict[str, Any]) -> Column:
    """Inverse of `column_to_avro`.

    Raises:
        TypeError: as `value_from_avro`, for a slice inside a value.
    """
    value = datum["value"]["value"]
    if isinstance(value, tuple) and value[0] == _SLICE:
        piece = TensorSlice(**{**value[1], "shape": tuple(value[1]["shape"])})
        return Column(datum["name"], datum["leaf"], piece)
    return Column(datum["name"], datum["leaf"], value_from_avro(datum["value"]))


def value_to_avro(value: "PlainValue | TensorSlice") -> dict[str, Any]:
    """Returns the datum of a `Value`."""
    if value is None:
        return {"value": None}
    # The branch is named, never guessed: True must not become 1, nor 1 become 1.0.
    if (primitive := _PRIMITIVES.get(type(value))) is not None:
        return {"value": (primitive, value)}
    if isinstance(value, TensorSlice):
        datum = {
            "dtype": value.dtype,
            "shape": list(value.shape),
            "total_bytes": value.total_bytes,
            "offset": value.offset,
            "slice_bytes": value.slice_bytes,
            "codec": value.codec,
            "data": value.data,
            "base": value.base,
        }
        return {"value": (_SLICE, datum)}
    if isinstance(value, TensorRef):
        return {"value": (_REF, {"leaf": value.leaf})}
    if isinstance(value, dict):
        entries = [{"key": value_to_avro(key), "value": value_to_avro(item)} for key, item in value.items()]
        return {"value": (_MAP, {"entries": entries})}
    if isinstance(value, (list, tuple)):
        name = _LIST if isinstance(value, list) else _TUPLE
        return {"value": (name, {"items": [value_to_avro(item) for item in value]})}
    raise TypeError(f"a column cannot carry a {type(value).__name__}")


def value_from_avro(datum: dict[str, Any]) -> PlainValue:
    """Inverse of `value_to_avro`, for anything but a slice.

    Raises:
        TypeError: a slice, a map key that is no scalar, or more than `MAX_NUMBER_KEYS` numbers as keys of one map.
    """
    value: Any = datum["value"]
    if not isinstance(value, tuple):
        scalar: PlainValue = value
        return scalar
    name, record = value
    if name == _LIST:
        return [value_from_avro(item) for item in record["items"]]
    if name == _TUPLE:
        return tuple(value_from_avro(item) for item in record["items"])
    if name == _MAP:
        keys = [_key_from_avro(entry["key"]) for entry in record["entries"]]
        if has_too_many_numbers(keys):
            raise TypeError(f"a map has more than {MAX_NUMBER_KEYS} numbers as keys")
        values = [value_from_avro(entry["value"]) for entry in record["entries"]]
        return dict(zip(keys, values, strict=True))
    if name == _REF:
        return TensorRef(record["leaf"])
    raise TypeError("a tensor slice stands inside a value; only a column can be one")


def has_too_many_numbers(keys: Sequence[object]) -> bool:
    """Returns whether the keys of a map have more numbers among them than a reader takes."""
    return len(keys) > MAX_NUMBER_KEYS and sum(isinstance(key, (int, float)) for key in keys) > MAX_NUMBER_KEYS


def _key_from_avro(datum: dict[str, Any]) -> PlainValue:
    key: Any = datum["value"]
    if isinstance(key, tuple):
        raise TypeError(f"a map has a {key[0]} as key; only scalars can be keys")
    scalar: PlainValue = key
    return scalar
