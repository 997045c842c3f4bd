"""Tensors and Python values to columns and back."""

from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcast.schemas import Column, DecodeError, TensorRef
from rollcast.schemas.codec import DELTA_PLANES, PLANES, RAW, compress, decompress_into
from rollcast.schemas.dtypes import ITEM_BYTES
from rollcast.schemas.tensors import UNSUPPORTED_KEY, Replaced, columns_of, normalise, unflatten


def _round_trip(value: Any) -> Any:
    return unflatten(columns_of([("x", normalise("x", value, Replaced()))]))["x"]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", ITEM_BYTES)
@pytest.mark.parametrize("shape", [(0,), (), (3,), (2, 0, 3), (2, 3)])
def test_every_dtype_comes_back_bit_equal_also_when_empty(name: str, shape: tuple[int, ...]) -> None:
    dtype = getattr(torch, name)
    elements = int(np.prod(shape))
    raw = torch.randint(0, 2 if name == "bool" else 256, (elements * dtype.itemsize,), dtype=torch.uint8)
    tensor = (raw.view(dtype) if elements else torch.empty(0, dtype=dtype)).reshape(shape)
    back = _round_trip(tensor)
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    if elements:
        assert torch.equal(back.reshape(-1).view(torch.uint8), raw)


def test_bfloat16_travels_as_its_little_endian_bytes() -> None:
    (column,) = columns_of([("x", torch.tensor([1.0, -0.1], dtype=torch.bfloat16))])
    assert bytes(column.value.data) == bytes.fromhex("803fcdbd")  # type: ignore[union-attr]  # it is a TensorSlice


def test_strided_transposed_and_tracked_tensors_keep_values_and_lose_the_graph() -> None:
    base = torch.arange(12.0, requires_grad=True).reshape(3, 4)
    for view in (base.T, base[:, ::2], base[1:]):
        back = _round_trip(view)
        assert torch.equal(back, view)
        assert not back.requires_grad


def test_nan_payloads_and_negative_zero_survive() -> None:
    tensor = torch.tensor([0x7FC00001, -0x80000000], dtype=torch.int32).view(torch.float32)
    assert torch.equal(_round_trip(tensor).view(torch.int32), tensor.view(torch.int32))


def test_numpy_values_become_plain_scalars_and_tensors() -> None:
    class Level(IntEnum):
        HIGH = 3

    values = [np.float64(1.0), np.int32(2), np.bool_(True), np.str_("s"), Level.HIGH, np.float32(0.5)]
    back = _round_trip(values)
    assert back == [1.0, 2, True, "s", 3, 0.5]
    assert [type(item) for item in back] == [float, int, bool, str, int, float]
    array = _round_trip(np.arange(6, dtype=">i4").reshape(2, 3)[:, ::-1])
    assert torch.equal(array, torch.tensor([[2, 1, 0], [5, 4, 3]], dtype=torch.int32))


def test_a_subclass_of_a_list_or_tuple_becomes_the_plain_type() -> None:
    for value, plain in ((range(3), [0, 1, 2]), (torch.Size([4, 5]), (4, 5)), ([True, 1], [True, 1])):
        back = normalise("lengths", value, Replaced())
        assert back == plain
        assert type(back) is type(plain)


def test_nested_tensors_keep_their_place() -> None:
    value = {"a": [torch.ones(2), ("b", torch.zeros(0))], 3: None}
    back = _round_trip(value)
    assert list(back) == ["a", 3]
    assert torch.equal(back["a"][0], torch.ones(2))
    assert back["a"][1][0] == "b"
    assert back["a"][1][1].shape == (0,)


@pytest.mark.parametrize(
    "value",
    [
        object(),
        len,
        2**63,
        -(2**63) - 1,
        {1, 2},
        1j,
        np.datetime64("2026-01-01"),
        np.array(["text"]),
        "\ud800",
        {(1, 2): "tuple key"},
        torch.empty(2, device="meta"),
        torch.eye(2).to_sparse(),
    ],
    ids=repr,
)
def test_what_cannot_be_carried_costs_itself_alone(value: object) -> None:
    replaced = Replaced()
    back = normalise("odd", [1, value, value], replaced)
    assert back[0] == 1
    assert list(back[1]) == [UNSUPPORTED_KEY]
    assert replaced.count == 2


@pytest.mark.parametrize(
    ("name", "becomes"), [("set", "set"), (np.str_("set"), "set"), ("\ud800", {UNSUPPORTED_KEY: "builtins.str"})]
)
def test_only_the_name_of_a_type_makes_a_marker(name: object, becomes: object) -> None:
    (inside,) = normalise("odd", {UNSUPPORTED_KEY: name}, Replaced()).values()
    assert inside == becomes
    assert type(inside) is type(becomes)


@pytest.fixture
def nothing_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of a process that has met no such value yet."""
    monkeypatch.setattr("rollcast.schemas.tensors._warned_fields", set())


@pytest.mark.usefixtures("nothing_warned_of")
def test_a_field_is_warned_of_once_in_a_process_however_many_rollouts_have_it(caplog: pytest.LogCaptureFixture) -> None:
    for field in ("odd", "strange", "odd", "strange"):
        normalise(field, [1j, 1j], Replaced())
    assert len(caplog.records) == 2
    assert "'odd'" in caplog.text
    assert "'strange'" in caplog.text


@pytest.mark.usefixtures("nothing_warned_of")
@pytest.mark.parametrize("value", [2**63, -(2**63) - 1])
def test_an_integer_that_is_too_large_is_called_so(value: int, caplog: pytest.LogCaptureFixture) -> None:
    normalise("odd", [value], Replaced())
    assert "field 'odd': an integer beyond signed 64 bits cannot be carried" in caplog.text


@pytest.mark.usefixtures("nothing_warned_of")
def test_fields_without_end_are_not_warned_of_without_end(caplog: pytest.LogCaptureFixture) -> None:
    for number in range(2000):
        normalise(f"field-{number}", 1j, Replaced())
    assert len(caplog.records) == 1000


@pytest.mark.parametrize(
    "leaves", [[TensorRef(1), TensorRef(1)], [], [TensorRef(2)]], ids=["shared", "unused", "missing"]
)
def test_each_inner_tensor_has_exactly_one_place(leaves: list[TensorRef]) -> None:
    (_, inner) = columns_of([("x", [torch.zeros(2)])])
    with pytest.raises(DecodeError):
        unflatten([Column("x", 0, [*leaves]), inner])


def test_a_list_that_holds_itself_ends_in_a_marker() -> None:
    loop: list[Any] = []
    loop.append(loop)
    replaced = Replaced()
    normalise("loop", loop, replaced)
    assert replaced.count == 1


def test_unflattened_tensors_own_exactly_their_memory() -> None:
    back = _round_trip(torch.zeros(1_000_000)[:1000])
    assert back.untyped_storage().nbytes() == 4000


@pytest.mark.parametrize("item_bytes", sorted(set(ITEM_BYTES.values())))
def test_bytes_come_back_through_every_codec(item_bytes: int) -> None:
    generator = np.random.default_rng(item_bytes)
    codecs = set()
    ramp = np.arange(10_000, dtype=np.uint64).view(np.uint8).tobytes()
    for raw in (b"", b"12345678" * 4, bytes(80_000), generator.bytes(80_000), ramp):
        codec, data = compress(raw, item_bytes)
        assert _decoded(codec, data, len(raw), item_bytes) == raw
        codecs.add(codec)
    assert codecs == {RAW, PLANES}


@pytest.mark.parametrize("item_bytes", sorted(set(ITEM_BYTES.values())))
def test_planes_that_repeat_one_byte_take_two_bytes_each(item_bytes: int) -> None:
    elements = np.random.default_rng(item_bytes).integers(0, 256, (1000, item_bytes), np.uint8)
    for changing in range(item_bytes):
        constant = np.tile(np.arange(7, 7 + item_bytes, dtype=np.uint8), (1000, 1))
        constant[:, changing] = elements[:, changing]
        codec, data = compress(constant.tobytes(), item_bytes)
        assert _decoded(codec, data, constant.size, item_bytes) == constant.tobytes()
        assert codec == RAW or len(data) == 2 * (item_bytes - 1) + 1 + 1000


def _decoded(codec: str, data: bytes | memoryview, size: int, item_bytes: int, base: bytes | None = None) -> bytes:
    out = np.empty(size, np.uint8)
    decompress_into(out, codec, data, item_bytes, None if base is None else np.frombuffer(base, np.uint8))
    return out.tobytes()


_BIT_PATTERNS = [0x7FC00001, 0xFFC12345, 0x7F800000, 0x80000000, 0, 1, 0x7FFFFFFF, 0xFFFFFFFF]


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.sampled_from(_BIT_PATTERNS) | st.integers(0, 2**32 - 1)] * 2), min_size=16))
def test_differences_of_any_bit_patterns_come_back(pairs: list[tuple[int, int]]) -> None:
    own, base = (np.array(column, np.uint32).tobytes() for column in zip(*pairs, strict=True))
    codec, data = compress(own, 4, base)
    assert _decoded(codec, data, len(own), 4, base) == own


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floats_close_to_those_of_another_slice_travel_as_differences(dtype: type) -> None:
    generator = np.random.default_rng(1)
    base: np.ndarray[Any, Any] = generator.random(5000).astype(dtype)
    own: np.ndarray[Any, Any] = (base * (1 + 0.001 * generator.random(5000))).astype(dtype)
    codec, data = compress(own.tobytes(), own.itemsize, base.tobytes())
    assert codec == DELTA_PLANES
    assert len(data) < len(compress(own.tobytes(), own.itemsize)[1])
    assert _decoded(codec, data, own.nbytes, own.itemsize, base.tobytes()) == own.tobytes()


def test_a_constant_slice_travels_as_itself_whatever_is_close_to_it() -> None:
    base = np.random.default_rng(1).random(5000, np.float32)
    codec, data = compress(np.ones(5000, np.float32).tobytes(), 4, base.tobytes())
    assert (codec, len(data)) == (PLANES, 8)


def test_differences_that_are_all_alike_count_as_many_bytes_as_there_are() -> None:
    base = np.arange(200, dtype=np.uint16)
    own = (base + 5).tobytes()
    assert compress(own, 2, base.tobytes()) == compress(own, 2)
    assert compress(own, 2, own) == (DELTA_PLANES, bytes([1, 0, 1, 0]))


def test_differences_need_a_base_of_their_size_and_a_width() -> None:
    data = bytes([1, 0] * 4)
    for base in (None, bytes(4), bytes(12)):
        with pytest.raises(DecodeError, match="names no slice"):
            _decoded(DELTA_PLANES, data, 8, 4, base)
    with pytest.raises(DecodeError, match="cannot be differences"):
        _decoded(DELTA_PLANES, data[:2], 8, 1, bytes(8))


def _zstd_plane(frame: bytes) -> bytes:
    return b"\x02" + len(frame).to_bytes(4, "little") + frame


def test_a_frame_without_content_size_decodes_under_the_cap() -> None:
    writer = zstandard.ZstdCompressor(write_content_size=False)
    assert _decoded(PLANES, _zstd_plane(writer.compress(bytes(1000))), 1000, 1) == bytes(1000)
    for size in (999, 1001):
        with pytest.raises(DecodeError):
            _decoded(PLANES, _zstd_plane(writer.compress(bytes(1000))), size, 1)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" + bytes(24),
        b"\x00" + bytes(25) + b"\x01\x00" * 2,
        b"\x01\x00" * 3,
        b"\x01\x00" * 4 + b"JUNK",
        b"\x01\x00" * 3 + b"\x01",
        b"\x01\x00" * 3 + b"\x03\x00",
        b"\x01\x00" * 3 + b"\x02\xff\xff\xff\xff",
        b"\x01\x00" * 3 + b"\x02\x00\x00",
        b"\x01\x00" * 3 + _zstd_plane(zstandard.ZstdCompressor().compress(bytes(26))),
    ],
    ids=["empty", "short", "cut", "plane missing", "tail", "no byte", "mode", "length", "cut length", "frame size"],
)
def test_planes_that_are_not_what_was_announced_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        _decoded(PLANES, data, 100, 4)


def test_a_slice_that_is_no_whole_number_of_elements_is_refused() -> None:
    with pytest.raises(DecodeError, match="no whole number"):
        _decoded(PLANES, b"\x01\x00" * 4, 101, 4)


@pytest.mark.parametrize(
    "data",
    [
        zstandard.ZstdCompressor().compress(bytes(256 * 1024**2)),
        bytes.fromhex("28b52ffde06c060606063636363636"[:24]),
        bytes.fromhex("28b52ffde06c06060663636363"),
        b"",
        b"no frame",
        zstandard.ZstdCompressor().compress(bytes(100)) + b"JUNK",
        zstandard.ZstdCompressor().compress(bytes(100))[:-2],
    ],
    ids=["256 MiB claimed", "huge window", "huge claim", "empty", "foreign", "tail", "cut"],
)
def test_hostile_frames_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        _decoded(PLANES, _zstd_plane(data), 100, 1)


def test_threads_share_no_codec_context() -> None:
    def work(seed: int) -> bool:
        generator = np.random.default_rng(seed)
        for _ in range(1000):
            raw = bytes(generator.integers(0, 4, 200, dtype=np.uint8))
            codec, data = compress(raw, 4)
            out = np.empty(len(raw), np.uint8)
            decompress_into(out, codec, data, 4)
            if out.tobytes() != raw:
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
