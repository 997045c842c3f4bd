"""Reads values of JSON that somebody may have damaged or forged, each of the type and range that it must have."""

import contextlib
import math
import re
from typing import Any

MAX_INT = 2**31 - 1
MAX_LONG = 2**63 - 1

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}\Z")
_MAX_NAME_BYTES = 255


def number(value: object, *, lowest: int = 0, highest: int = MAX_LONG) -> int:
    """Returns the value if it is an integer in these bounds.

    Raises:
        ValueError: it is not.
    """
    if type(value) is not int or not lowest <= value <= highest:
        raise ValueError(f"{_shown(value)} is no integer from {lowest} to {highest}")
    return value


def number_as_key(value: str) -> int:
    """Returns the number that a key of an object stands for.

    Raises:
        ValueError: it stands for none.
    """
    if not _NUMBER.fullmatch(value):
        raise ValueError(f"{_shown(value)} is no number")
    return number(int(value))


def mean(value: object) -> float | None:
    """Returns the value if it is a finite number or None.

    Raises:
        ValueError: it is neither.
    """
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # An integer may be too large for a float.
        with contextlib.suppress(OverflowError):
            if math.isfinite(found := float(value)):
                return found
    raise ValueError(f"{_shown(value)} is no finite number")


def text(value: object) -> str:
    """Returns the value if it is a string that can be written.

    Raises:
        ValueError: it is not.
    """
    if type(value) is not str:
        raise ValueError(f"{_shown(value)} is no text")
    value.encode()
    return value


def file_name(value: object) -> str:
    """Returns the value if it is the name of a file in the same folder.

    Raises:
        ValueError: it is not.
    """
    name = text(value)
    if name in ("", ".", "..") or not {"/", "\0"}.isdisjoint(name) or len(name.encode()) > _MAX_NAME_BYTES:
        raise ValueError(f"{_shown(name)} is no file name")
    return name


def sha256(value: object) -> str:
    """Returns the value if it is a SHA-256 in hex.

    Raises:
        ValueError: it is not.
    """
    if not _SHA256.match(text(value)):
        raise ValueError(f"{_shown(value)} is no SHA-256")
    return text(value)


def sequence(value: object) -> list[Any]:
    """Returns the value if it is an array.

    Raises:
        ValueError: it is not.
    """
    if type(value) is not list:
        raise ValueError(f"{_shown(value)} is no array")
    return value


def mapping(value: object) -> dict[str, Any]:
    """Returns the value if it is an object.

    Raises:
        ValueError: it is not.
    """
    if type(value) is not dict:
        raise ValueError(f"{_shown(value)} is no object")
    return value


def _shown(value: object) -> str:
    shown = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
