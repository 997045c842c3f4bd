"""Whatever bytes come as a frame or a packed value: a typed error or an event, in little memory and time."""

from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given, settings

from fixtures.hostile_frames import (
    SEED_FRAMES,
    built_frames,
    check_frame,
    check_value,
    flat_memory,
    mutated_frames,
    random_frames,
    value_bodies,
)
from rollcast.schemas import Column, DecodeError, LimitError, SamplePart, decode, encode
from rollcast.schemas.events import PlainValue
from rollcast.schemas.framing import decode_value, encode_value
from rollcast.schemas.limits import MAX_NUMBER_KEYS
from rollcast.schemas.tensors import UNSUPPORTED_KEY, Replaced, normalise
from unit.test_wire_events import EVENTS

quick = settings(deadline=None, max_examples=100)
"""The machine may be busy; a hang fails by the test's timeout."""

_PART = cast(SamplePart, EVENTS["SamplePart"])


def test_every_seed_is_a_valid_frame() -> None:
    assert all(check_frame(frame) is not None for frame in SEED_FRAMES)


@quick
@given(random_frames)
def test_random_bytes_are_a_typed_error_or_an_event(frame: bytes) -> None:
    with flat_memory():
        check_frame(frame)


@quick
@given(mutated_frames)
def test_a_changed_frame_is_a_typed_error_or_an_event(frame: bytes) -> None:
    with flat_memory():
        check_frame(frame)


@quick
@given(built_frames)
def test_a_frame_of_hostile_values_is_a_typed_error_or_an_event(frame: bytes) -> None:
    with flat_memory():
        check_frame(frame)


@quick
@given(value_bodies)
def test_a_hostile_packed_value_is_a_typed_error_or_a_value(body: bytes) -> None:
    with flat_memory():
        check_value(body)


@pytest.mark.parametrize("field", ["slot", "data_parallel_rank", "part", "part_count"])
@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**63 - 1])
def test_an_int_of_more_than_32_bits_is_refused(field: str, value: int) -> None:
    changes: dict[str, Any] = {field: value}
    with pytest.raises(DecodeError, match="no 32-bit integer"):
        decode(encode(replace(_PART, **changes)))


def test_a_column_name_that_no_writer_makes_is_refused_before_an_error_repeats_it() -> None:
    with pytest.raises(LimitError, match="max_name_chars is 1025"):
        decode(encode(replace(_PART, columns=(Column("x" * 1025, 0, None),))))


def test_a_map_of_so_many_numbers_that_they_can_be_chosen_to_keep_a_reader_busy_is_refused() -> None:
    keys: dict[PlainValue, PlainValue] = dict.fromkeys(range(MAX_NUMBER_KEYS + 1))
    body = encode_value(keys)
    with pytest.raises(DecodeError, match="numbers as keys"):
        decode_value(body)


def test_a_map_of_many_numbers_costs_its_writer_that_value_alone() -> None:
    replaced = Replaced()
    crowd: dict[object, None] = dict.fromkeys(range(MAX_NUMBER_KEYS))
    assert normalise("counts", crowd, replaced) == crowd
    crowd[0.5] = None
    assert normalise("counts", crowd, replaced) == {UNSUPPORTED_KEY: "builtins.dict"}
    texts: dict[object, None] = dict.fromkeys(map(str, range(MAX_NUMBER_KEYS + 2)))
    assert decode_value(encode_value(normalise("counts", texts, replaced))) == texts
    assert replaced.count == 1
