"""Sizes and counts as a person reads them."""


def size_in_words(count: float) -> str:
    """Returns a number of bytes in the decimal unit that fits: `812 B`, `9.1 kB`, `30.0 MB`, up to TB."""
    if round(count) < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        # As it is shown: 999.96 would be 1000.0.
        if round(count, 1) < 1000:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} TB"


def counted(count: int, one: str, several: str = "") -> str:
    """Returns a count with its noun in the right number: `1 shard`, `2 shards`; `several` where an s does not do."""
    return f"{count} {one if count == 1 else several or f'{one}s'}"
