"""Hostile, cut and foreign frames: always a typed error, never a wrong value, never a large allocation."""

import os
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollcast.schemas import (
    Column,
    ContractError,
    DecodeError,
    LimitError,
    Limits,
    SamplePart,
    TensorRef,
    TensorSlice,
    UnknownSchemaError,
    decode,
    encode,
)
from rollcast.schemas.events import PlainValue
from rollcast.schemas.framing import current_schema, decode_value, encode_value
from unit.test_column_bytes import by_fastavro
from unit.test_wire_events import EVENTS

_FRAME = encode(EVENTS["SamplePart"])
_HEADER = _FRAME[:10]


def test_the_frame_starts_with_the_avro_single_object_marker() -> None:
    assert _FRAME[:2].hex() == "c301"
    assert current_schema("SamplePart").header == _HEADER


def test_bytes_after_the_body_are_refused() -> None:
    with pytest.raises(DecodeError, match="4 bytes follow"):
        decode(_FRAME + b"JUNK")


@pytest.mark.parametrize("length", range(len(_FRAME)))
def test_a_frame_cut_anywhere_is_refused(length: int) -> None:
    with pytest.raises(DecodeError):
        decode(_FRAME[:length])


def test_an_unknown_fingerprint_is_refused_and_named() -> None:
    with pytest.raises(UnknownSchemaError, match="0102030405060708"):
        decode(b"\xc3\x01" + bytes(range(1, 9)) + _FRAME[10:])


def test_a_body_under_the_fingerprint_of_another_schema_is_refused() -> None:
    with pytest.raises(DecodeError):
        decode(current_schema("DpShard").header + _FRAME[10:])


def test_the_confluent_header_is_refused_not_misread() -> None:
    with pytest.raises(DecodeError, match="schema registry"):
        decode(bytes.fromhex("0000000001") + _FRAME[10:])


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(DecodeError, match="length of -1"):
        decode(_HEADER + b"\x01" + _FRAME[11:])


def test_a_few_bytes_that_claim_millions_of_items_are_refused_before_allocation() -> None:
    head = _FRAME[: _FRAME.index(b"\x0creward") - 1]
    bomb = head + _varint(3_000_000)
    tracemalloc.start()
    with pytest.raises(DecodeError):
        decode(bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_more_items_than_the_cap_are_refused_by_their_count() -> None:
    with pytest.raises(LimitError, match="max_items is 3000000"):
        decode_value(b"\x0c" + _varint(3_000_000), Limits(max_items=1000))


def test_a_part_of_very_many_small_values_is_refused_before_the_decoder_builds_them() -> None:
    part = EVENTS["SamplePart"]
    assert isinstance(part, SamplePart)
    crowd: list[PlainValue] = [[] for _ in range(100_000)]
    frame = encode(replace(part, columns=(Column("x", 0, crowd),)))
    with pytest.raises(LimitError, match="max_inline_values is 100001"):
        decode(frame)


def test_a_small_part_that_decodes_to_much_is_refused() -> None:
    part = EVENTS["SamplePart"]
    assert isinstance(part, SamplePart)
    bomb = TensorSlice(
        dtype="uint8",
        shape=(2**29,),
        total_bytes=2**29,
        offset=0,
        slice_bytes=2**29,
        codec="PLANES",
        data=b"\x01\x00",
    )
    with pytest.raises(LimitError, match="max_part_raw_bytes"):
        decode(encode(replace(part, columns=(Column("x", 0, bomb),))))
    with pytest.raises(DecodeError, match="negative size"):
        decode(encode(replace(part, columns=(Column("x", 0, replace(bomb, slice_bytes=-1)),))))


@pytest.mark.parametrize("value", ["slice in a list", "reference as a key", "list as a key"])
def test_values_that_no_writer_makes_are_refused(value: str) -> None:
    part = EVENTS["SamplePart"]
    assert isinstance(part, SamplePart)
    (*_, tensor) = (column.value for column in part.columns)
    made: Any = {
        "slice in a list": [tensor],
        "reference as a key": {TensorRef(1): 1},
        "list as a key": {(1, 2): 1},
    }[value]
    none, one = (by_fastavro(replace(part, columns=columns)) for columns in ((), (Column("", 0, made),)))
    with pytest.raises(DecodeError):
        decode(one)
    # Before it: the number of columns, an empty name and leaf 0; after it the end of the columns.
    with pytest.raises(DecodeError):
        decode_value(one[len(none) + 2 : -1])


def test_nesting_beyond_the_cap_is_refused_without_recursion_into_the_decoder() -> None:
    deep = b"\x0c\x02" * 200_000
    with pytest.raises(LimitError, match="max_depth"):
        decode_value(deep)


def test_an_event_above_the_size_cap_is_refused() -> None:
    with pytest.raises(LimitError, match="max_message_bytes"):
        decode(_FRAME, Limits(max_message_bytes=len(_FRAME) - 1))


def test_text_that_is_no_utf8_is_refused() -> None:
    with pytest.raises(DecodeError):
        decode(_FRAME.replace(b"text", b"\xff\xfe\xfd\xfc"))


@given(st.binary(max_size=200))
def test_random_bytes_never_decode_to_anything_but_a_typed_error(noise: bytes) -> None:
    for frame in (noise, _HEADER + noise):
        try:
            event = decode(frame)
        except ContractError:
            continue
        # By chance a frame may be valid; then it must be exactly what its event encodes to, array blocks aside.
        assert decode(encode(event)) == event


@given(st.integers(10, len(_FRAME) - 1), st.integers(0, 255))
def test_a_changed_byte_gives_a_typed_error_or_a_whole_event(position: int, value: int) -> None:
    frame = bytearray(_FRAME)
    frame[position] = value
    try:
        event = decode(bytes(frame))
    except DecodeError:
        return
    assert isinstance(event, SamplePart)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**63 - 1)
        | st.floats(allow_nan=False)
        | st.text()
        | st.binary(),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.tuples(inner, inner)
            | st.dictionaries(st.text(max_size=4) | st.integers(-9, 9), inner, max_size=4)
        ),
        max_leaves=20,
    )
)
def test_any_plain_value_comes_back_with_its_types(value: object) -> None:
    back = decode_value(encode_value(value))  # type: ignore[arg-type]  # hypothesis types its values as object
    assert repr(back) == repr(value)


def test_the_bytes_do_not_depend_on_the_time_zone() -> None:
    program = (
        "from unit.test_wire_events import EVENTS; from rollcast.schemas import encode\n"
        "print(b''.join(encode(event) for event in EVENTS.values()).hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "TZ": zone, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            capture_output=True,
            check=True,
        ).stdout
        for zone in ("UTC", "Asia/Shanghai")
    }
    assert len(outputs) == 1


def _varint(value: int) -> bytes:
    value <<= 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
