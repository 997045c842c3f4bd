"""Whatever parts come for a slot or a rollout: a typed error or content that can be written again, in little memory."""

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings

from fixtures.hostile_frames import flat_memory
from fixtures.hostile_parts import (
    CODECS,
    GENUINE,
    as_planes,
    check_slot,
    hostile_slots,
)
from fixtures.hostile_streams import HostileStream, check_stream, hostile_streams
from rollcast.consumer.open_rollout import resident_size
from rollcast.schemas import (
    Column,
    DecodeError,
    LimitError,
    SamplePart,
    ShardContentError,
    TensorRef,
    TensorSlice,
    decode,
    encode,
)
from rollcast.schemas.codec import decompress_into
from rollcast.schemas.joining import join

quick = settings(deadline=None, max_examples=100)
_PART = next(event for event in GENUINE if isinstance(event, SamplePart))


@quick
@given(hostile_slots)
def test_hostile_parts_of_a_slot_are_a_typed_error_or_content(parts: list[SamplePart]) -> None:
    with flat_memory():
        check_slot(parts)


@quick
@given(hostile_streams)
def test_a_hostile_stream_costs_its_own_records_alone(stream: HostileStream) -> None:
    with flat_memory():
        check_stream(stream)


def test_the_genuine_stream_passes_the_same_checks() -> None:
    (restored,) = check_stream(HostileStream(GENUINE, 10**9))
    assert restored.payload is not None
    assert len(restored.payload["samples"]) == 4
    assert not restored.bad_slots


def _one(**changes: Any) -> SamplePart:
    piece = TensorSlice(dtype="uint8", shape=(1,), total_bytes=1, offset=0, slice_bytes=1, codec="RAW", data=b"x")
    return replace(_PART, columns=(Column("x", 0, replace(piece, **changes)),))


@pytest.mark.timeout(20)
def test_a_shape_of_very_many_dimensions_keeps_no_reader_busy() -> None:
    with pytest.raises(ShardContentError, match="has 100000 dimensions"):
        join([_one(shape=(2**62,) * 100_000)])


@pytest.mark.parametrize("shape", [(0, 2**62, 2**62), (2**62, 2**62, 0), (0, 2**62)], ids=str)
def test_an_empty_tensor_of_overflowing_strides_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(LimitError, match="max_tensor_bytes"):
        join([_one(shape=shape, total_bytes=0, slice_bytes=0, data=b"")])


def test_one_byte_of_a_huge_tensor_allocates_nothing() -> None:
    with flat_memory(1_000_000), pytest.raises(ShardContentError, match="has 1 of 4294967296 bytes"):
        join([_one(shape=(2**32,), total_bytes=2**32)])


def test_a_long_dtype_is_not_repeated_in_the_error() -> None:
    with pytest.raises(ShardContentError) as caught:
        join([_one(dtype="x" * 100_000)])
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("leaf", [-1, 262_145, 2**31 - 1])
def test_a_leaf_that_no_writer_numbers_so_is_refused(leaf: int) -> None:
    part = _one()
    columns = (Column("x", 0, TensorRef(leaf)), replace(part.columns[0], leaf=leaf))
    with pytest.raises(DecodeError, match="leaf"):
        decode(encode(replace(part, columns=columns)))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("junk", [b"", b"junk", zstandard.ZstdCompressor().compress(b"more")])
def test_an_empty_slice_has_no_frame_behind_which_bytes_could_hide(codec: str, junk: bytes) -> None:
    frame = zstandard.ZstdCompressor().compress(b"") + junk
    for data in (frame, as_planes(frame)):
        with pytest.raises(DecodeError):
            decompress_into(np.empty(0, np.uint8), codec, data, 1)


@pytest.mark.parametrize(
    "value",
    [[[]] * 9_000, [{}] * 9_000, [TensorRef(1)] * 9_000, list(range(300, 9_000)), {str(n): n for n in range(4_000)}],
    ids=["lists", "maps", "references", "numbers", "map"],
)
def test_the_memory_of_small_values_is_counted(value: Any) -> None:
    frame = encode(replace(_PART, columns=(Column("x", 0, value),)))
    decode(frame)
    tracemalloc.start()
    event = decode(frame)
    resident = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert isinstance(event, SamplePart)
    assert resident < 1.5 * resident_size(event, len(frame))
