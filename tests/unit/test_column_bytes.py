"""Columns are written by us and not by fastavro: byte for byte the same, and refused where it would refuse them."""

import io
from dataclasses import replace
from typing import Any, cast

import fastavro
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollcast.schemas import Column, EncodeError, SamplePart, TensorRef, TensorSlice, encode
from rollcast.schemas.codec import DELTA_PLANES, PLANES, RAW, SPOOL
from rollcast.schemas.framing import current_schema, encode_announced, encode_column, event_to_avro
from unit.test_wire_events import EVENTS

_PART = cast(SamplePart, EVENTS["SamplePart"])
_LONGS = st.integers(-(2**63), 2**63 - 1)
_INTS = st.integers(-(2**31), 2**31 - 1)
_KEYS = st.none() | st.booleans() | _LONGS | st.text(max_size=4) | st.binary(max_size=4)
_SCALARS = st.none() | st.booleans() | _LONGS | st.floats() | st.text() | st.binary()
_VALUES = st.recursive(
    _SCALARS | st.builds(TensorRef, _INTS),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(_KEYS, inner, max_size=3)
    ),
    max_leaves=12,
)
_SLICES = st.builds(
    TensorSlice,
    dtype=st.text(max_size=9),
    shape=st.lists(_LONGS, max_size=4).map(tuple),
    total_bytes=_LONGS,
    offset=_LONGS,
    slice_bytes=_LONGS,
    codec=st.sampled_from([RAW, PLANES, DELTA_PLANES, SPOOL]),
    data=st.binary(max_size=300) | st.binary(max_size=300).map(lambda data: memoryview(data)),
    base=st.none() | _INTS,
)
_COLUMNS = st.builds(Column, st.text(max_size=90), _INTS, _VALUES | _SLICES)


def by_fastavro(part: SamplePart) -> bytes:
    """Returns the frame of a part, written by fastavro."""
    schema, out = current_schema("SamplePart"), io.BytesIO()
    fastavro.schemaless_writer(out, schema.parsed, event_to_avro(part), strict=True)
    return schema.header + out.getvalue()


@given(st.lists(_COLUMNS, max_size=5))
def test_a_part_is_what_fastavro_makes_of_it(columns: list[Column]) -> None:
    part = replace(_PART, columns=tuple(columns))
    assert encode(part) == by_fastavro(part)


@given(_COLUMNS)
def test_a_column_alone_is_what_stands_in_a_part(column: Column) -> None:
    none, one = (by_fastavro(replace(_PART, columns=columns)) for columns in ((), (column,)))
    assert one == none[:-1] + b"\x02" + encode_column(column) + b"\x00"


@given(_COLUMNS)
def test_a_column_announces_its_tensor_and_not_how_it_is_cut(column: Column) -> None:
    whole = column
    if isinstance(column.value, TensorSlice):
        header = replace(column.value, offset=0, slice_bytes=column.value.total_bytes, codec=RAW, base=None, data=b"")
        whole = replace(column, value=header)
    assert encode_announced(column) == encode_column(whole)


_LIKE_INTEGERS = [True, *(kind(np.iinfo(kind).max) for kind in (np.int8, np.uint8, np.int32, np.uint32, np.int64))]


@pytest.mark.parametrize("number", _LIKE_INTEGERS, ids=repr)
def test_what_stands_for_an_integer_is_written_as_that_integer(number: Any) -> None:
    ours, plain = (
        Column("x", 0, replace(_SLICE, shape=(each,), total_bytes=each, slice_bytes=each))
        for each in (number, int(number))
    )
    assert encode_column(ours) == encode_column(plain)


@pytest.mark.parametrize("number", [1.0, 64.0])
def test_a_float_is_no_integer_even_where_an_equal_integer_was_written(number: Any) -> None:
    equals: list[Any] = [int(number), np.int64(number), bool(number)]
    for equal in equals:
        encode_column(Column("x", 0, replace(_SLICE, shape=(equal,))))
    with pytest.raises(EncodeError, match="does not fit"):
        encode_column(Column("x", 0, replace(_SLICE, shape=(number,))))


def test_data_is_as_long_as_its_bytes_whatever_its_elements_are() -> None:
    data = bytes(range(8))
    wide = replace(_SLICE, data=memoryview(data).cast("i"))
    assert encode_column(Column("x", 0, wide)) == encode_column(Column("x", 0, replace(_SLICE, data=data)))


_SLICE = TensorSlice(dtype="int8", shape=(2,), total_bytes=2, offset=0, slice_bytes=2, codec=RAW, data=b"ab")
_UNFIT: list[Any] = [
    Column(None, 0, 1),  # type: ignore[arg-type]
    Column("\ud800", 0, 1),
    Column("x", 2**31, 1),
    Column("x", "1", 1),  # type: ignore[arg-type]
    Column("x", 0, 2**63),
    Column("x", 0, -(2**63) - 1),
    Column("x", 0, "\ud800"),
    Column("x", 0, object()),  # type: ignore[arg-type]
    Column("x", 0, [{1, 2}]),  # type: ignore[list-item]
    Column("x", 0, [_SLICE]),  # type: ignore[list-item]
    Column("x", 0, {_SLICE: 1}),  # type: ignore[dict-item]
    Column("x", 0, TensorRef(2**31)),
    *(
        Column("x", 0, replace(_SLICE, **wrong))
        for wrong in (
            {"dtype": 8},
            {"shape": (2.5,)},
            {"shape": None},
            {"total_bytes": 2**63},
            {"offset": "0"},
            {"slice_bytes": None},
            {"codec": "OTHER"},
            {"data": None},
            {"data": "ab"},
            {"base": 2**31},
            {"base": "x"},
        )
    ),
]


@pytest.mark.parametrize("column", _UNFIT, ids=repr)
def test_a_column_that_does_not_fit_the_schema_is_refused(column: Column) -> None:
    with pytest.raises(EncodeError, match="does not fit"):
        encode(replace(_PART, columns=(Column("good", 0, 1), column)))
