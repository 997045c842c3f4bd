"""A dump's content as the bytes of a file that `torch.load` reads, in the layout of `torch.save`."""

import sys
from collections.abc import Callable, Iterator

from rollcast.consumer.store.archive import ALIGNMENT, Archive
from rollcast.consumer.store.pickled import pickled
from rollcast.schemas.tensors import tensor_bytes

_FORMAT_VERSION, _ARCHIVE_VERSION = b"1", b"3\n"


def save(content: object, write: Callable[[bytes | memoryview], object]) -> Iterator[float]:
    """Writes the content, in order from the first byte to the last; yields after each tensor the share of them written.

    Nothing is written until this is iterated, and the file is whole only at the end of that.

    Args:
        content: as for `pickled`; tensors on the CPU.
        write: takes the bytes.

    Raises:
        TypeError: a dump cannot hold that content.
    """
    pickle, tensors = pickled(content)
    archive = Archive(write)
    archive.add("data.pkl", pickle)
    archive.add(".format_version", _FORMAT_VERSION)
    archive.add(".storage_alignment", str(ALIGNMENT).encode())
    archive.add("byteorder", sys.byteorder.encode())
    for key, tensor in enumerate(tensors):
        archive.add(f"data/{key}", tensor_bytes(tensor).numpy().data)
        yield (key + 1) / len(tensors)
    archive.add("version", _ARCHIVE_VERSION)
    archive.add(".data/serialization_id", f"{archive.digest:040}".encode())
    archive.end()
