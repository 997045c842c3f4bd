"""The copy of planned segments: every byte at its place, and nothing read or written beyond what is there."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollcast.producer.mover import can_pin, prepare_moves
from rollcast.producer.plan import Segments
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


def _segments(*rows: tuple[int, int, int, int]) -> Segments:
    tensors, targets, starts, sizes = np.array(rows, np.int64).reshape(-1, 4).T
    return Segments(tensors=tensors, targets=targets, starts=starts, sizes=sizes)


def _moved(sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the sources one after the other, moved whole."""
    rows, reached = [], 0
    for index, source in enumerate(sources):
        if source.nbytes:
            rows.append((index, reached, 0, source.nbytes))
            reached += source.nbytes
    data = torch.full((reached,), 170, dtype=torch.uint8)
    prepare_moves(sources, _segments(*rows), data)()
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
    ],
    ids=["transposed", "strided", "permuted", "expanded", "offset", "scalar"],
)
def test_a_tensor_arrives_in_the_order_of_its_elements_however_it_lies_in_memory(source: torch.Tensor) -> None:
    moved = _moved([torch.zeros(3, dtype=torch.int16), source, torch.ones(1, dtype=torch.uint8)])
    assert moved[6:-1].tolist() == tensor_bytes(source.clone(memory_format=torch.contiguous_format)).tolist()
    assert moved[:6].tolist() == [0] * 6
    assert int(moved[-1]) == 1


def test_nothing_to_move_moves_nothing() -> None:
    data = torch.arange(4, dtype=torch.uint8)
    prepare_moves((), _segments(), data)()
    prepare_moves((torch.empty(0), torch.empty(0, 7).T), _segments(), data)()
    assert data.tolist() == [0, 1, 2, 3]
    assert not can_pin()


@given(st.data())
def test_any_segments_of_any_tensors_arrive_and_touch_nothing_else(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    sources = [torch.randint(0, 256, (2 * size,), dtype=torch.uint8) for size in sizes]
    # Every second one is not contiguous.
    sources = [source[::2] if index % 2 else source[: len(source) // 2] for index, source in enumerate(sources)]
    rows, reached = [], 0
    for tensor, size in enumerate(sizes):
        start = data.draw(st.integers(0, size - 1))
        length = data.draw(st.integers(1, size - start))
        reached += data.draw(st.integers(0, 3))
        rows.append((tensor, reached, start, length))
        reached += length
    target = torch.full((reached + 3,), 170, dtype=torch.uint8)
    expected = target.clone()
    for tensor, place, start, length in rows:
        expected[place : place + length] = sources[tensor][start : start + length]
    prepare_moves(sources, _segments(*data.draw(st.permutations(rows))), target)()
    assert torch.equal(target, expected)


@pytest.mark.parametrize(
    "row",
    [(0, 0, 0, 9), (0, 0, 8, 1), (0, 9, 0, 8), (0, 16, 0, 1), (0, 0, -1, 2), (0, -1, 0, 2), (0, 4, 4, -2)],
    ids=["too-long", "after", "over-the-end", "beyond", "before", "before-the-target", "negative"],
)
@pytest.mark.parametrize("step", [1, 2])
def test_a_segment_beyond_its_source_or_target_moves_nothing_at_all(row: tuple[int, int, int, int], step: int) -> None:
    source = torch.arange(8 * step, dtype=torch.uint8)[::step]
    data = torch.zeros(16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="does not hold what was planned"):
        prepare_moves((source,), _segments((0, 0, 0, 8), row), data)()
    assert not data.any()


@pytest.mark.parametrize("first", [0, 3])
def test_a_tensor_whose_storage_was_freed_is_an_error_and_not_the_end_of_the_process(first: int) -> None:
    whole = torch.arange(8, dtype=torch.uint8)
    source = whole[first:]
    whole.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="does not hold what was planned"):
        prepare_moves((source,), _segments((0, 0, 0, 4)), torch.zeros(4, dtype=torch.uint8))()
