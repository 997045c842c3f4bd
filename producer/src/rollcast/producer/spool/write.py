"""Writes a bundle: one shard of a rollout on disk, as one tensor file and one Avro file."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from io import BytesIO
from itertools import chain
from pathlib import Path

import fastavro
import xxhash

from rollcast.producer.errors import BundleExistsError, SpoolError
from rollcast.producer.plan import ShardPlan, ShardRecords
from rollcast.producer.spool.read import (
    DIGEST_KEY,
    NO_DIGEST,
    RECORDS_DIGEST_KEY,
    RECORDS_NAME,
    TENSORS_NAME,
    record_schema,
    tensors_digest,
)
from rollcast.producer.spool.tensor_file import TensorFiles, finish_tensor_file, head_size
from rollcast.schemas.codec import SPOOL
from rollcast.schemas.events import SHARD_SLOT, Column, DpShard, SamplePart, TensorSlice
from rollcast.schemas.framing import event_to_avro
from rollcast.schemas.tensors import dtype_name

_FILLED, _FAILED = "filled.", "failed."


class BundleWriter:
    """A bundle that its context-parallel peers fill together; the first to come creates the folder and the file.

    Attributes:
        path: its folder while it is unfinished.
        file: the tensor file.

    Raises:
        SpoolFullError: no room.
        SpoolError: the folder cannot be made.
    """

    def __init__(self, filling: Path, plan: ShardPlan, files: TensorFiles) -> None:
        self.path = filling
        try:
            filling.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise SpoolError(f"{filling} cannot be made: {exc.strerror}; check spool_dir") from exc
        try:
            self.file = files.open(filling / TENSORS_NAME, head_size(plan.records.columns), plan.data_bytes)
        except SpoolError:
            # Whatever was reserved goes back; with this rank's objection no peer will fill it.
            shutil.rmtree(filling, ignore_errors=True)
            raise

    def mark_filled(self, context_parallel_rank: int) -> None:
        """Says that this peer's bytes are all there.

        Raises:
            SpoolError: they are not: the bundle was removed, and perhaps begun anew by a peer, with another file.
        """
        if not self.file.is_at(self.path / TENSORS_NAME):
            raise SpoolError(f"{self.path} was removed while it was filled")
        self.file.close()
        (self.path / f"{_FILLED}{context_parallel_rank}").touch()

    def mark_failed(self, context_parallel_rank: int, reason: str) -> None:
        """Says that this peer's bytes will not come, so that nobody waits for them."""
        self.file.discard()
        # Where even that fails, the wait for the peer has a bound.
        with contextlib.suppress(OSError):
            half = self.path / f".{_FAILED}{context_parallel_rank}"
            half.write_text(reason)
            half.rename(self.path / f"{_FAILED}{context_parallel_rank}")

    def discard(self) -> None:
        """Gives the bundle up; every peer may call it."""
        self.file.discard()
        shutil.rmtree(self.path, ignore_errors=True)


def is_filled(filling: Path, peers: int) -> bool:
    """Tells whether every peer has filled its part."""
    return all((filling / f"{_FILLED}{rank}").exists() for rank in range(peers))


def failure_of(filling: Path) -> str | None:
    """Returns why a peer could not fill its part; None where none says so."""
    with contextlib.suppress(OSError):
        for note in filling.glob(f"{_FAILED}*"):
            return note.read_text(errors="replace")
    return None


def commit_bundle(
    filling: Path, committed: Path, content: ShardRecords | None, shard: DpShard, *, fsync: bool = False
) -> None:
    """Adds the Avro file and gives the bundle its final name; the rename is the commit.

    Args:
        filling: folder with the filled tensor file; may be absent where `content` is None.
        committed: its final name.
        content: None for a dropped rollout, which has no content.
        shard: the closing event, digests and part counts still empty.
        fsync: a committed bundle survives a power cut.

    Raises:
        BundleExistsError: there is a bundle with the final name.
        SpoolError: the tensor file is gone.
        OSError: the disk does not take it.
    """
    filling.mkdir(parents=True, exist_ok=True)
    if content is not None:
        finish_tensor_file(filling / TENSORS_NAME, content)
    metadata = {} if content is None else {DIGEST_KEY: tensors_digest(filling / TENSORS_NAME)}
    # One at a time: thousands of objects at once would have the garbage collector walk through the whole trainer.
    events: Iterator[SamplePart | DpShard] = chain(() if content is None else _slot_records(content, shard), (shard,))
    records = ((f"rollcast.{type(event).__name__}", event_to_avro(event)) for event in events)
    file = BytesIO()
    fastavro.writer(file, record_schema(), records, metadata=metadata | {RECORDS_DIGEST_KEY: NO_DIGEST.decode()})
    (filling / RECORDS_NAME).write_bytes(_with_digest(file.getvalue()))
    for mark in filling.glob(f"{_FILLED}*"):
        mark.unlink()
    if fsync:
        for path in (*filling.iterdir(), filling):
            _fsync(path)
    try:
        filling.rename(committed)
    except OSError as exc:
        if exc.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
            raise
        raise BundleExistsError(
            f"{committed} exists: another trainer publishes with the same run_id and attempt; raise one's attempt"
        ) from exc
    if fsync:
        _fsync(committed.parent)


def _with_digest(records: bytes) -> bytes:
    return records.replace(NO_DIGEST, xxhash.xxh3_128(records).hexdigest().encode(), 1)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _slot_records(content: ShardRecords, shard: DpShard) -> Iterator[SamplePart]:
    for slot in [*range(len(content.positions)), SHARD_SLOT]:
        own = slot == SHARD_SLOT
        yield SamplePart(
            run_id=shard.run_id,
            attempt=shard.attempt,
            stream=shard.stream,
            rollout_id=shard.rollout_id,
            data_parallel_rank=shard.data_parallel_rank,
            slot=slot,
            rollout_position=None if own else content.positions[slot],
            sample_index=None if own else content.sample_indices[slot],
            part=0,
            part_count=1,
            columns=tuple(_columns_of(content, slot)),
        )


def _columns_of(content: ShardRecords, slot: int) -> Iterator[Column]:
    for column in content.columns:
        if slot in column.plain:
            yield Column(column.name, 0, column.plain[slot])
        for tensor in column.tensors_of(slot):
            in_spool = TensorSlice(
                dtype=dtype_name(tensor.dtype),
                shape=tuple(tensor.shape),
                total_bytes=tensor.size,
                offset=tensor.offset,
                slice_bytes=tensor.size,
                codec=SPOOL,
                data=b"",
            )
            yield Column(column.name, tensor.leaf, in_spool)
