"""Reads a committed bundle; free of torch, for the shipper."""

import mmap
import threading
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import fastavro
import xxhash

from rollcast.producer.errors import SpoolError, UnusableBundleError
from rollcast.producer.spool.pages import require_readable
from rollcast.schemas.codec import RAW, SPOOL
from rollcast.schemas.events import Column, DpShard, SamplePart, TensorSlice
from rollcast.schemas.framing import current_schema, event_from_avro

TENSORS_NAME = "tensors.safetensors"
RECORDS_NAME = "records.avro"
DIGEST_KEY = "rollcast.tensors.xxh3_128"
"""In the metadata of the Avro file: digest of what is behind the head of the tensor file."""
RECORDS_DIGEST_KEY = "rollcast.records.xxh3_128"
"""In the metadata of the Avro file: digest of that file as it was with `NO_DIGEST` in its place."""
NO_DIGEST = b"0" * 32
HEAD_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its head, in so many bytes."""

_DIGEST_STEP_BYTES = 16 * 1024**2


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """A committed bundle, its tensors still in the mapped file.

    Attributes:
        path: where it was when it was read.
        slots: one record for each slot, the shard's own last; tensors whole, codec `RAW`, data in the mapping.
        shard: the closing event, digests and part counts still empty.
        tensors: the mapping, without the head of the file.
        digest: of these, taken when the bundle was committed; None where the records have none.
    """

    path: Path
    slots: tuple[SamplePart, ...]
    shard: DpShard
    tensors: memoryview
    digest: str | None


def read_bundle(path: Path) -> Bundle:
    """Returns a committed bundle; what its tensors hold is neither read nor checked, see `check_tensors`.

    Raises:
        UnusableBundleError: its tensors are missing or were not written by this program.
        SpoolError: its records are damaged, so that nothing is known of it.
        OSError: the machine is in trouble; the bundle may be good.
    """
    events, shard, digest = _read_records(path / RECORDS_NAME)
    parts = [event for event in events if isinstance(event, SamplePart)]
    try:
        data = _map_data(path / TENSORS_NAME) if parts else memoryview(b"")
        slots = tuple(
            replace(part, columns=tuple(_resolve(column, data, path) for column in part.columns)) for part in parts
        )
    except SpoolError as exc:
        raise UnusableBundleError(str(exc), shard) from exc
    return Bundle(path=path, slots=slots, shard=shard, tensors=data, digest=digest if parts else None)


def check_tensors(bundle: Bundle, given_up: threading.Event) -> None:
    """Returns if the tensors of a bundle are as they were when it was committed, whatever its disk did since.

    Reads all of them, so that their pages are in memory afterwards. Long work, which leaves the interpreter lock free.

    Args:
        bundle: may be on its way already; but without this nobody may hear that it is whole.
        given_up: once it is set, this ends soon, however slow the disk.

    Raises:
        InterruptedError: it was given up.
        UnusableBundleError: they are damaged.
        OSError: the machine is in trouble; the bundle may be good.
    """
    try:
        digest = _digest(bundle.tensors, given_up)
    except SpoolError as exc:
        raise UnusableBundleError(str(exc), bundle.shard) from exc
    if bundle.digest not in (None, digest):
        problem = f"{bundle.path / TENSORS_NAME} is damaged: its digest is not the one in {RECORDS_NAME}"
        raise UnusableBundleError(problem, bundle.shard)


def read_closing_event(path: Path) -> DpShard:
    """Returns the closing event of a committed bundle, without a look at its tensors.

    Raises:
        SpoolError: it is damaged or was not written by this program.
        OSError: the machine is in trouble; the bundle may be good.
    """
    return _read_records(path / RECORDS_NAME)[1]


def tensors_digest(path: Path) -> str:
    """Returns the digest of a filled tensor file; long work, which leaves the interpreter lock free.

    Raises:
        SpoolError: it is missing or not of this layout.
    """
    return _digest(_map_data(path))


def record_schema() -> Any:
    """Returns the schema of the Avro file: slots as `SamplePart`s, then one `DpShard`."""
    return fastavro.parse_schema([current_schema("SamplePart").avsc, current_schema("DpShard").avsc])


def _digest(data: memoryview, given_up: threading.Event | None = None) -> str:
    digest = xxhash.xxh3_128()
    for start in range(0, len(data), _DIGEST_STEP_BYTES):
        if given_up is not None and given_up.is_set():
            raise InterruptedError("the bundle is not wanted any more")
        piece = data[start : start + _DIGEST_STEP_BYTES]
        require_readable(piece)
        digest.update(piece)
    return str(digest.hexdigest())


def _read_records(path: Path) -> tuple[list[SamplePart | DpShard], DpShard, str | None]:
    """Returns the events of the Avro file, the last of them, and the digest that it gives of the tensor file."""
    try:
        data = path.read_bytes()
        reader = fastavro.reader(BytesIO(data), return_record_name=True)
        _check_records(data, reader.metadata.get(RECORDS_DIGEST_KEY))
        events = [_event(item) for item in reader]
        digest = reader.metadata.get(DIGEST_KEY)
    except FileNotFoundError as exc:
        raise SpoolError(f"{path} is missing") from exc
    except (OSError, SpoolError):
        raise
    except Exception as exc:  # a damaged container makes fastavro raise whatever comes
        raise SpoolError(f"{path} cannot be read: {exc!r}") from exc
    if not events or not isinstance(events[-1], DpShard):
        raise SpoolError(f"{path} does not end with a DpShard")
    return events, events[-1], digest


def _check_records(data: bytes, digest: str | None) -> None:
    # Avro has no check sum: a flipped bit in a plain value is another value.
    if digest is not None and xxhash.xxh3_128(data.replace(digest.encode(), NO_DIGEST, 1)).hexdigest() != digest:
        raise SpoolError(f"{RECORDS_NAME} is damaged: its digest is not the one that stands in it")


def _event(item: Any) -> SamplePart | DpShard:
    name, datum = item
    event = event_from_avro(name.rpartition(".")[2], datum)
    if not isinstance(event, (SamplePart, DpShard)):
        raise TypeError(f"a bundle holds no {name}")
    return event


def _resolve(column: Column, data: memoryview, path: Path) -> Column:
    value = column.value
    if not isinstance(value, TensorSlice) or value.codec != SPOOL:
        return column
    end = value.offset + value.total_bytes
    if not 0 <= value.offset <= end <= len(data):
        raise SpoolError(f"{path}: column {column.name!r} lies at {value.offset}..{end} of {len(data)} bytes")
    whole = value.another(offset=0, slice_bytes=value.slice_bytes, codec=RAW, data=data[value.offset : end])
    return Column(column.name, column.leaf, whole)


def _map_data(path: Path) -> memoryview:
    """Returns the bytes behind the head of a finished file, mapped read-only.

    Raises:
        SpoolError: it is missing or not of this layout.
    """
    try:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as exc:
        raise SpoolError(f"{path} is missing") from exc
    except ValueError as exc:
        raise SpoolError(f"{path} cannot be mapped: {exc}") from exc
    start = HEAD_LENGTH_BYTES + int.from_bytes(mapping[:HEAD_LENGTH_BYTES], "little")
    if len(mapping) < HEAD_LENGTH_BYTES or start > len(mapping):
        raise SpoolError(f"{path} is no tensor file: its head is said to end at byte {start} of {len(mapping)}")
    return memoryview(mapping)[start:]
