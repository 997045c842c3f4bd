"""Counts in words, for logs."""


def counted(count: int, what: str) -> str:
    """Returns a count with its noun in the right number."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def counted_bundles(bundles: int, marks: int) -> str:
    """Returns how many bundles and marks of dropped rollouts there are; a mark is a bundle too, but nobody's data."""
    if not marks:
        return counted(bundles, "bundle")
    told = counted(marks, "drop mark")
    return f"{counted(bundles, 'bundle')} and {told}" if bundles else told
