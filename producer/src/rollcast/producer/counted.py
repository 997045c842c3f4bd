"""What waits, in words, for logs."""

from rollcast.schemas.sizes import counted


def counted_bundles(bundles: int, marks: int) -> str:
    """Returns how many bundles and marks of dropped rollouts there are; a mark is a bundle too, but nobody's data."""
    if not marks:
        return counted(bundles, "bundle")
    told = counted(marks, "drop mark")
    return f"{counted(bundles, 'bundle')} and {told}" if bundles else told
