"""Walks an Avro body before it is decoded, so that no claim in it is believed unchecked.

The decoder would recurse as deep as the bytes say and build as many items as they claim. This walk reads the same
bytes with a cap on both, proves every length to lie inside the body, and needs no memory of its own.
"""

from collections.abc import Callable
from typing import Any

from rollcast.schemas.errors import DecodeError, LimitError
from rollcast.schemas.limits import Limits

_MAX_VARINT_BYTES = 10
_MIN_INT, _MAX_INT = -(2**31), 2**31 - 1
_FIXED_SIZES = {"null": 0, "float": 4, "double": 8}


class _Walk:
    __slots__ = ("body", "items", "limits", "max_values", "position", "values")

    def __init__(self, body: bytes, limits: Limits, max_values: int, start: int) -> None:
        self.body, self.limits, self.max_values = body, limits, max_values
        self.position, self.items, self.values = start, 0, 0

    def take(self, size: int) -> None:
        if size < 0 or size > len(self.body) - self.position:
            raise DecodeError(
                f"a length of {size} at byte {self.position} does not fit the remaining "
                f"{len(self.body) - self.position} bytes: the record is cut or corrupt"
            )
        self.position += size

    def long(self) -> int:
        body, start = self.body, self.position
        if start < len(body) and (byte := body[start]) < 0x80:  # most of them
            self.position = start + 1
            return (byte >> 1) ^ -(byte & 1)
        result = shift = 0
        for index in range(start, min(start + _MAX_VARINT_BYTES, len(body))):
            byte = body[index]
            result |= (byte & 0x7F) << shift
            if byte < 0x80:
                if result >> 64:
                    break
                self.position = index + 1
                return (result >> 1) ^ -(result & 1)
            shift += 7
        raise DecodeError(f"no valid integer at byte {start}: the record is cut or corrupt")

    def count(self, items: int, *, are_values: bool) -> None:
        self.items += items
        if self.items > self.limits.max_items:
            raise LimitError("max_items", self.items, self.limits.max_items)
        # The decoder builds objects for each of them, and holds the interpreter lock all the while.
        self.values += items if are_values else 0
        if self.values > self.max_values:
            raise LimitError("max_inline_values", self.values, self.max_values)


_Skip = Callable[[_Walk, int], None]
Check = Callable[[bytes, Limits, int], None]
"""Takes bytes, the caps, and where in the bytes the body begins."""


def compile_walk(schema: dict[str, Any], *, inline: bool = True) -> Check:
    """Returns a check for bodies of `schema` (as parsed from its `.avsc`, names defined before use).

    The check returns when the bytes from the start on are exactly one datum of the schema.

    Args:
        schema: as it stands in the package.
        inline: the body is an event, whose values are few; not a packed value, which may have many.

    Raises (the check):
        DecodeError: cut, padded, an index or length out of range.
        LimitError: deeper or with more items than `Limits` allows.
    """
    named: dict[str, _Skip] = {}
    root = _compile(schema, named)

    def check(body: bytes, limits: Limits, start: int) -> None:
        walk = _Walk(body, limits, limits.max_inline_values if inline else limits.max_items, start)
        root(walk, 0)
        if walk.position != len(body):
            raise DecodeError(f"{len(body) - walk.position} bytes follow the end of the record")

    return check


def _compile(schema: Any, named: dict[str, _Skip]) -> _Skip:
    if isinstance(schema, list):
        return _union([_compile(branch, named) for branch in schema])
    kind = schema["type"] if isinstance(schema, dict) else schema
    if isinstance(kind, (dict, list)):
        return _compile(kind, named)
    if kind == "int":
        return _int
    if kind == "long":
        return _long
    if kind in {"string", "bytes"}:
        return _sized
    if kind == "boolean":
        return _boolean
    if kind in _FIXED_SIZES:
        return _fixed(_FIXED_SIZES[kind])
    if kind == "array":
        return _array(_compile(schema["items"], named), are_values=_is_record(schema["items"]))
    if kind == "fixed":
        return _register(schema, named, _fixed(schema["size"]))
    if kind == "enum":
        return _register(schema, named, _enum(len(schema["symbols"])))
    if kind == "record":
        fields: list[_Skip] = []
        skip = _register(schema, named, _record(fields))
        fields.extend(_compile(field["type"], named) for field in schema["fields"])
        return skip
    return named[kind.rpartition(".")[2]]


def _is_record(schema: Any) -> bool:
    return schema == "Value" or (isinstance(schema, dict) and schema["type"] == "record")


def _register(schema: dict[str, Any], named: dict[str, _Skip], skip: _Skip) -> _Skip:
    named[schema["name"].rpartition(".")[2]] = skip
    return skip


def _int(walk: _Walk, _depth: int) -> None:
    # fastavro would read and write more; readers in other languages would not.
    if not _MIN_INT <= (value := walk.long()) <= _MAX_INT:
        raise DecodeError(f"{value} at byte {walk.position} is no 32-bit integer: the record is corrupt")


def _long(walk: _Walk, _depth: int) -> None:
    walk.long()


def _sized(walk: _Walk, _depth: int) -> None:
    walk.take(walk.long())


def _fixed(size: int) -> _Skip:
    def skip(walk: _Walk, _depth: int) -> None:
        walk.take(size)

    return skip


def _boolean(walk: _Walk, _depth: int) -> None:
    walk.take(1)
    if walk.body[walk.position - 1] > 1:
        raise DecodeError(f"no boolean at byte {walk.position - 1}: the record is corrupt")


def _enum(symbols: int) -> _Skip:
    def skip(walk: _Walk, _depth: int) -> None:
        index = walk.long()
        if not 0 <= index < symbols:
            raise DecodeError(f"enum index {index} of {symbols}: the record is corrupt")

    return skip


def _union(branches: list[_Skip]) -> _Skip:
    def skip(walk: _Walk, depth: int) -> None:
        index = walk.long()
        if not 0 <= index < len(branches):
            raise DecodeError(f"union index {index} of {len(branches)}: the record is corrupt")
        branches[index](walk, depth + 1)

    return skip


def _record(fields: list[_Skip]) -> _Skip:
    def skip(walk: _Walk, depth: int) -> None:
        if depth > walk.limits.max_depth:
            raise LimitError("max_depth", depth, walk.limits.max_depth)
        for field in fields:
            field(walk, depth + 1)

    return skip


def _array(item: _Skip, *, are_values: bool) -> _Skip:
    def skip(walk: _Walk, depth: int) -> None:
        while count := walk.long():
            if count < 0:
                # The long form of a block: the count is negated and the size of the block follows.
                count = -count
                walk.long()
            walk.count(count, are_values=are_values)
            for _ in range(count):
                item(walk, depth + 1)

    return skip
