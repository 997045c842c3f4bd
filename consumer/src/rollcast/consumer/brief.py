"""Text of bounded length for log lines, whatever a record claims."""

from collections.abc import Iterable
from itertools import islice

_MAX_CHARS = 200
_MAX_ITEMS = 5


def brief(text: object) -> str:
    """Returns the text, cut at 200 characters."""
    whole = str(text)
    return whole if len(whole) <= _MAX_CHARS else f"{whole[: _MAX_CHARS - 3]}..."


def first_few(items: Iterable[object]) -> str:
    """Returns the first items, comma-separated; three dots stand for the rest."""
    shown = [str(item) for item in islice(items, _MAX_ITEMS + 1)]
    return ", ".join([*shown[:_MAX_ITEMS], *["..."] * (len(shown) > _MAX_ITEMS)])
