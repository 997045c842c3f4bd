"""A package that is missing, in one sentence; it needs none itself."""

# Among them is zstd's: without it no part could be compressed.
_OF_EXTRA = ("aiokafka", "fastavro", "numpy", "prometheus_client", "torch", "xxhash", "zstandard")


def sentence_of(error: ModuleNotFoundError, who: str) -> str | None:
    """Returns what is missing and how to install it; None where it is nothing that the extra brings.

    Args:
        error: of the import.
        who: needs it.
    """
    package = (error.name or "").partition(".")[0]
    if package not in _OF_EXTRA:
        return None
    # Not by way of rollcast.schemas, which needs some of them itself.
    return f"{who} needs {package}: pip install -c constraints.txt '.[producer]' in a clone of Rollcast"
