"""The copy of planned tensors: every byte at its place, and nothing read or written beyond what is there."""

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollcast.producer.mover import can_join, can_pin, join, move
from rollcast.producer.plan import Copies
from rollcast.schemas.dtypes import ITEM_BYTES
from rollcast.schemas.tensors import tensor_bytes

_DTYPES = [getattr(torch, name) for name in ITEM_BYTES if hasattr(torch, name)]

# Quiet and signalling, of either sign, with payloads.
_NAN_PATTERNS = {
    torch.float16: (torch.int16, [0x7E01, 0x7C01, -0x01FF, -0x03FF]),
    torch.bfloat16: (torch.int16, [0x7FC1, 0x7F81, -0x003F, -0x007F]),
    torch.float32: (torch.int32, [0x7FC00001, 0x7F800001, -0x003FFFFF, -0x007FFFFF]),
    torch.float64: (torch.int64, [0x7FF8000000000001, 0x7FF0000000000001, -0x0007FFFFFFFFFFFF, -0x000FFFFFFFFFFFFF]),
}


def _copies(*rows: tuple[int, int, int]) -> Copies:
    return Copies(*np.array(rows, np.int64).reshape(-1, 3).T)


def _moved(sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the sources one after the other, moved whole."""
    rows, reached = [], 0
    for index, source in enumerate(sources):
        if source.nbytes:
            rows.append((index, reached, source.nbytes))
            reached += source.nbytes
    data = torch.full((reached,), 170, dtype=torch.uint8)
    move(sources, _copies(*rows), data)
    return data


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_every_dtype_arrives_bit_for_bit(dtype: torch.dtype) -> None:
    pattern = torch.arange(256, dtype=torch.uint8).repeat(2)
    if dtype is torch.bool:
        pattern = pattern % 2
    assert torch.equal(_moved([pattern.view(dtype)]), pattern)


@pytest.mark.parametrize("dtype", _NAN_PATTERNS, ids=str)
@pytest.mark.parametrize("step", [1, 2])
def test_the_payload_of_a_nan_arrives(dtype: torch.dtype, step: int) -> None:
    integers, patterns = _NAN_PATTERNS[dtype]
    source = torch.tensor(patterns, dtype=integers).repeat_interleave(step).view(dtype)[::step]
    assert source.isnan().all()
    assert _moved([source]).view(integers).tolist() == patterns


@pytest.mark.parametrize(
    "source",
    [
        torch.arange(24).reshape(4, 6).T,
        torch.arange(24)[::3],
        torch.arange(24).reshape(2, 3, 4).transpose(0, 2)[1:],
        torch.tensor([7.0]).expand(5),
        torch.arange(24)[5:9],
        torch.tensor(3.5),
        torch.arange(24)[5::30],
    ],
    ids=["transposed", "strided", "permuted", "expanded", "offset", "scalar", "one of many"],
)
def test_a_tensor_arrives_in_the_order_of_its_elements_however_it_lies_in_memory(source: torch.Tensor) -> None:
    moved = _moved([torch.zeros(3, dtype=torch.int16), source, torch.ones(1, dtype=torch.uint8)])
    assert moved[6:-1].tolist() == tensor_bytes(source.clone(memory_format=torch.contiguous_format)).tolist()
    assert moved[:6].tolist() == [0] * 6
    assert int(moved[-1]) == 1


def test_nothing_to_move_moves_nothing() -> None:
    data = torch.arange(4, dtype=torch.uint8)
    move((), _copies(), data)
    move((torch.empty(0), torch.empty(0, 7).T), _copies(), data)
    assert data.tolist() == [0, 1, 2, 3]
    assert not can_pin()


@given(st.data())
def test_any_tensors_arrive_and_touch_nothing_else(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    sources = [torch.randint(0, 256, (2 * size,), dtype=torch.uint8) for size in sizes]
    # Every second one is not contiguous.
    sources = [source[::2] if index % 2 else source[: len(source) // 2] for index, source in enumerate(sources)]
    rows, reached = [], 0
    for tensor, size in enumerate(sizes):
        reached += data.draw(st.integers(0, 3))
        rows.append((tensor, reached, size))
        reached += size
    target = torch.full((reached + 3,), 170, dtype=torch.uint8)
    expected = target.clone()
    for tensor, place, size in rows:
        expected[place : place + size] = sources[tensor]
    move(sources, _copies(*data.draw(st.permutations(rows))), target)
    assert torch.equal(target, expected)


@pytest.mark.parametrize(
    "row",
    [(0, 0, 9), (0, 0, 7), (0, 9, 8), (0, 16, 8), (0, -1, 8), (0, 4, -2)],
    ids=["too-long", "too-short", "over-the-end", "beyond", "before-the-target", "negative"],
)
@pytest.mark.parametrize("step", [1, 2])
def test_a_copy_beyond_its_source_or_target_moves_nothing_at_all(row: tuple[int, int, int], step: int) -> None:
    source = torch.arange(8 * step, dtype=torch.uint8)[::step]
    data = torch.zeros(16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="does not hold what was planned"):
        move((source,), _copies((0, 0, 8), row), data)
    assert not data.any()


@pytest.mark.parametrize("first", [0, 3])
def test_a_tensor_whose_storage_was_freed_is_an_error_and_not_the_end_of_the_process(first: int) -> None:
    whole = torch.arange(8, dtype=torch.uint8)
    source = whole[first:]
    whole.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="does not hold what was planned"):
        move((source,), _copies((0, 0, 4)), torch.zeros(4, dtype=torch.uint8))


@given(
    dtype=st.sampled_from([torch.uint8, torch.float32, torch.bfloat16]),
    offset=st.integers(0, 3),
    step=st.integers(1, 3),
    length=st.integers(0, 5),
    kept=st.integers(0, 80),
    copies_of_one=st.booleans(),
)
def test_a_tensor_is_read_exactly_where_its_storage_has_all_of_it(
    dtype: torch.dtype, offset: int, step: int, length: int, kept: int, copies_of_one: bool
) -> None:
    whole = torch.ones(16, dtype=dtype)
    source = whole[offset : offset + step * length : step]
    if copies_of_one:
        source = whole[offset : offset + 1].expand(length)
    reached = offset + (length - 1) * source.stride(0) + 1 if length else 0
    kept = min(kept, whole.nbytes)
    whole.untyped_storage().resize_(kept)
    is_whole = reached * dtype.itemsize <= kept
    sources, data = (torch.ones(2, dtype=dtype), source), torch.zeros(64, dtype=torch.uint8)
    ends = [0, sources[0].nbytes, sources[0].nbytes + source.nbytes]
    place = data[: ends[-1]]

    # Of what is empty, `move` alone knows that it needs no storage.
    assert can_join(sources, dtype, place) is is_whole or not length
    with nullcontext() if is_whole else pytest.raises((ValueError, RuntimeError), match=r"planned|out of bounds"):
        move(sources, _copies(*((i, ends[i], ends[i + 1] - ends[i]) for i in range(2) if ends[i] < ends[i + 1])), data)
    if is_whole:
        assert torch.equal(place.view(dtype), torch.ones(2 + length, dtype=dtype))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", [dtype for dtype in _DTYPES if dtype is not torch.bool], ids=str)
@pytest.mark.parametrize("step", [1, 2])
def test_joined_tensors_arrive_side_by_side_bit_for_bit_and_touch_nothing_else(dtype: torch.dtype, step: int) -> None:
    pattern = torch.arange(256, dtype=torch.uint8).repeat(dtype.itemsize)
    wholes = [torch.roll(pattern, shift).view(dtype) for shift in (0, 1, 77)]
    # Of every second length the kernels of torch take another way.
    sources = tuple(whole[: length * step : step] for whole, length in zip(wholes, (1, 128, 37), strict=True))
    expected = torch.cat([tensor_bytes(source) for source in sources])
    data = torch.full((len(expected) + 2 * dtype.itemsize,), 170, dtype=torch.uint8)
    place = data[dtype.itemsize : -dtype.itemsize]
    assert can_join(sources, dtype, place)
    join(sources, dtype, place)
    assert torch.equal(data[dtype.itemsize : -dtype.itemsize], expected)
    assert {*data[: dtype.itemsize].tolist(), *data[-dtype.itemsize :].tolist()} == {170}


@pytest.mark.parametrize("dtype", _NAN_PATTERNS, ids=str)
def test_the_payload_of_a_nan_arrives_in_a_joined_tensor(dtype: torch.dtype) -> None:
    integers, patterns = _NAN_PATTERNS[dtype]
    source = torch.tensor(patterns, dtype=integers).view(dtype)
    target = torch.zeros(3 * source.nbytes, dtype=torch.uint8)
    join((source, source, source), dtype, target)
    assert target.view(integers).tolist() == 3 * patterns


def test_tensors_that_torch_would_not_join_bit_for_bit_are_not_joined() -> None:
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    data = torch.zeros(40, dtype=torch.uint8)
    assert not can_join((torch.ones(8, dtype=torch.bool),), torch.bool, data[:8])
    assert not can_join((torch.ones(4), freed), torch.float32, data[:32])
    assert not can_join((torch.ones(4), torch.ones(4, device="meta")), torch.float32, data[:32])
    assert not can_join((torch.ones(4),), torch.float32, data[2:18])


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")
@pytest.mark.parametrize("length", [3, 5])
def test_tensors_that_are_not_as_long_as_their_place_are_an_error(length: int) -> None:
    with pytest.raises(ValueError, match="do not hold the 32 that were planned"):
        join((torch.ones(4), torch.ones(length)), torch.float32, torch.zeros(40, dtype=torch.uint8)[:32])
