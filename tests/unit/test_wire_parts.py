"""Cutting a slot into parts and putting it together."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcast.schemas import (
    Column,
    DecodeError,
    LimitError,
    Limits,
    SamplePart,
    ShardContentError,
    TensorSlice,
    decode,
    encode,
)
from rollcast.schemas.joining import join, unpack_large_values
from rollcast.schemas.parts import MIN_PART_BYTES, content_digest, pack_large_values, split
from rollcast.schemas.tensors import columns_of, unflatten

_SLOT = SamplePart(
    run_id="run",
    attempt=1,
    rollout_id=2,
    data_parallel_rank=0,
    slot=0,
    rollout_position=None,
    sample_index=None,
    part=0,
    part_count=1,
    columns=(),
)


def _columns(**values: object) -> list[Column]:
    return pack_large_values(columns_of(values.items()))


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 60_000), max_size=5),
    text=st.integers(0, 40_000),
    max_part_bytes=st.integers(MIN_PART_BYTES, 200_000),
)
def test_parts_stay_under_the_limit_and_join_to_the_same_content(
    sizes: list[int], text: int, max_part_bytes: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    values = {f"t{i}": torch.rand(size, generator=generator) for i, size in enumerate(sizes)}
    columns = _columns(text="x" * text, numbers=list(range(text // 10)), **values)
    parts = split(_SLOT, columns, max_part_bytes)
    assert max(len(encode(part)) for part in parts) <= max_part_bytes
    assert [part.part for part in parts] == list(range(len(parts)))
    back = join(parts)
    assert content_digest(back) == content_digest(columns)
    restored = unflatten(unpack_large_values(back))
    assert restored["text"] == "x" * text
    assert all(torch.equal(restored[name], value) for name, value in values.items())


def test_a_tensor_larger_than_a_part_continues_in_further_parts() -> None:
    columns = _columns(x=torch.rand(300_000))
    parts = split(_SLOT, columns, 900 * 1024)
    assert len(parts) == 2
    assert content_digest(join(parts)) == content_digest(columns)


def test_the_digest_does_not_depend_on_the_cut_but_on_every_byte() -> None:
    tensor = torch.rand(50_000)
    digests = {content_digest(join(split(_SLOT, _columns(x=tensor), size))) for size in (20_000, 70_000, 900_000)}
    assert len(digests) == 1
    tensor[-1] += 1
    assert content_digest(_columns(x=tensor)) not in digests
    assert content_digest(_columns(y=tensor)) != content_digest(_columns(x=tensor))
    assert content_digest(_columns(x=1)) != content_digest(_columns(x=1.0))


def test_what_compresses_well_is_cut_before_a_part_decodes_to_too_much() -> None:
    columns = _columns(x=torch.zeros(10_000_000), **{f"n{number}": list(range(900)) for number in range(200)})
    parts = split(_SLOT, columns)
    assert len(parts) > 4
    back = [decode(encode(part)) for part in parts]
    assert content_digest(join(back)) == content_digest(columns)  # type: ignore[arg-type]  # parts decode to parts


def _close_columns(size: int) -> list[Column]:
    generator = torch.Generator().manual_seed(1)
    log_probs = torch.rand(size, generator=generator)
    return _columns(log_probs=log_probs, note=1, rollout_log_probs=log_probs * 1.0001, ref_log_probs=log_probs * 0.9999)


def _bases(part: SamplePart) -> dict[str, int | None]:
    return {column.name: column.value.base for column in part.columns if isinstance(column.value, TensorSlice)}


def test_log_probs_of_one_part_travel_as_differences_from_the_first() -> None:
    columns = _close_columns(5000)
    (part,) = split(_SLOT, columns)
    assert _bases(part) == {"log_probs": None, "rollout_log_probs": 0, "ref_log_probs": 0}
    back = decode(encode(part))
    assert content_digest(join([back])) == content_digest(columns)  # type: ignore[list-item]  # a part decodes to a part


@settings(deadline=None)
@given(size=st.integers(1, 30_000), max_part_bytes=st.integers(MIN_PART_BYTES, 200_000))
def test_differences_never_need_another_part(size: int, max_part_bytes: int) -> None:
    columns = _close_columns(size)
    parts = split(_SLOT, columns, max_part_bytes)
    assert max(len(encode(part)) for part in parts) <= max_part_bytes
    for part in parts:
        assert all(base is None or base < len(part.columns) for base in _bases(part).values())
    assert content_digest(join(parts)) == content_digest(columns)


@pytest.mark.parametrize("base", [None, -1, 1, 2, 3, 2**31 - 1])
def test_a_base_that_is_no_earlier_slice_of_the_part_is_refused(base: int | None) -> None:
    (part,) = split(_SLOT, _close_columns(5000))
    columns = [
        replace(column, value=replace(column.value, base=base))
        if isinstance(column.value, TensorSlice) and column.name == "rollout_log_probs"
        else column
        for column in part.columns
    ]
    with pytest.raises(DecodeError):
        join([replace(part, columns=tuple(columns))])


def test_an_empty_slot_is_one_part() -> None:
    assert join(split(_SLOT, [])) == []


def _two_parts() -> tuple[SamplePart, SamplePart]:
    first, second = split(_SLOT, _columns(x=torch.rand(8000)), 20_000)
    return first, second


def _with_slice(part: SamplePart, **changes: object) -> SamplePart:
    (column,) = part.columns
    assert isinstance(column.value, TensorSlice)
    return replace(part, columns=(replace(column, value=replace(column.value, **changes)),))  # type: ignore[arg-type]  # test data


@pytest.mark.parametrize(
    "changes",
    [
        {"offset": 4},
        {"slice_bytes": 2**40},
        {"slice_bytes": -4},
        {"total_bytes": 32_004},
        {"shape": (4000,)},
        {"shape": (-8000,)},
        {"dtype": "float64"},
        {"dtype": "no such"},
        {"dtype": "value"},
        {"total_bytes": -1},
    ],
    ids=str,
)
@pytest.mark.parametrize("which", [0, 1])
def test_slices_that_do_not_follow_each_other_are_refused(changes: dict[str, object], which: int) -> None:
    parts = list(_two_parts())
    parts[which] = _with_slice(parts[which], **changes)
    with pytest.raises((ShardContentError, LimitError)):
        join(parts)


def test_a_missing_part_or_a_swapped_one_is_refused() -> None:
    first, second = _two_parts()
    for parts in ([first], [second], [second, first], [first, first, second]):
        with pytest.raises(ShardContentError):
            join(parts)


def test_a_tensor_above_the_cap_is_refused_before_allocation() -> None:
    (part,) = split(_SLOT, _columns(x=torch.rand(10)))
    huge = _with_slice(part, total_bytes=2**50, shape=(2**48,))
    with pytest.raises(LimitError, match="max_tensor_bytes"):
        join([huge])
    with pytest.raises(LimitError, match="max_slot_bytes"):
        join([part], Limits(max_slot_bytes=39))
