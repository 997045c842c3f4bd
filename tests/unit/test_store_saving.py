"""What is saved loads as what `torch.save` saves: by torch, in every way it loads, and by other readers of archives."""

import io
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollcast.consumer.difference import differences
from rollcast.consumer.store.archive import Archive
from rollcast.consumer.store.pickled import pickled
from rollcast.consumer.store.saving import save
from rollcast.schemas.dtypes import ITEM_BYTES

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

_DTYPES = [getattr(torch, name) for name in ITEM_BYTES]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(_DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    size = int(np.prod(shape, dtype=int)) * dtype.itemsize
    raw = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 2 if dtype is torch.bool else 256, size, np.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


_PLAIN = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text() | st.binary()
# A key that is not equal to itself is found in no other map: it has a test of its own.
_KEYS = _PLAIN.filter(lambda key: key == key)
_CONTENT = st.recursive(
    _PLAIN | tensors(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(_PLAIN, max_size=1200)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(_KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def saved(content: object) -> bytes:
    out = io.BytesIO()
    for _ in save(content, out.write):
        pass
    return out.getvalue()


def saved_by_torch(content: object) -> bytes:
    out = io.BytesIO()
    torch.save(content, out)
    return out.getvalue()


@given(_CONTENT)
def test_any_content_loads_bit_for_bit(content: Any) -> None:
    for weights_only in (True, False):
        loaded = torch.load(io.BytesIO(saved(content)), weights_only=weights_only)
        assert differences(loaded, content) == []


def test_keys_that_are_no_numbers_are_kept() -> None:
    loaded = torch.load(io.BytesIO(saved({float("nan"): 1, float("-nan"): 2})), weights_only=True)
    assert [(str(key), value) for key, value in loaded.items()] == [("nan", 1), ("nan", 2)]


@given(_CONTENT)
def test_the_same_records_are_the_same_bytes_as_those_of_torch(content: Any) -> None:
    of_torch = saved_by_torch(content)
    out = io.BytesIO()
    archive = Archive(out.write)
    with zipfile.ZipFile(io.BytesIO(of_torch)) as records:
        for name in records.namelist():
            archive.add(name.removeprefix("archive/"), records.read(name))
    archive.end()
    assert out.getvalue() == of_torch


@given(tensors())
def test_a_tensor_is_told_as_torch_tells_it(tensor: torch.Tensor) -> None:
    with zipfile.ZipFile(io.BytesIO(saved_by_torch(tensor))) as records:
        expected = as_told(records.read("archive/data.pkl"))
    pickle_bytes, (kept,) = pickled(tensor)
    assert kept is tensor
    assert as_told(pickle_bytes) == expected


@dataclass(frozen=True)
class Called:
    """What a pickle refers to, or the result of calling it."""

    name: str
    arguments: tuple[Any, ...] | None = None

    def __call__(self, *arguments: Any) -> "Called":
        return Called(self.name, arguments)


def as_told(data: bytes) -> Any:
    """Returns what a pickle makes, without making it."""

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return Called(f"{module}.{name}")

        def persistent_load(self, pid: Any) -> Any:
            return pid

    return Reader(io.BytesIO(data)).load()


def test_names_stand_once_however_many_samples_have_them() -> None:
    samples = [{"a_long_name_of_a_column": torch.zeros(index), "other": index} for index in range(100)]
    data, _ = pickled(samples)
    assert data.count(b"a_long_name_of_a_column") == 1
    assert data.count(b"FloatStorage") == 1


def test_tensors_are_mapped_and_share_nothing(tmp_path: Path) -> None:
    tensor = torch.arange(10_000.0)
    path = tmp_path / "dump.pt"
    path.write_bytes(saved({"same": [tensor, tensor], "part": tensor[5:9], "turned": tensor.reshape(100, 100).T}))

    loaded = torch.load(path, weights_only=True, mmap=True)

    assert torch.equal(loaded["same"][0], tensor)
    assert torch.equal(loaded["same"][1], tensor)
    assert torch.equal(loaded["part"], tensor[5:9])
    assert torch.equal(loaded["turned"], tensor.reshape(100, 100).T)
    assert loaded["part"].untyped_storage().nbytes() == 16
    assert loaded["same"][0].data_ptr() != loaded["same"][1].data_ptr()


def test_torch_finds_the_data_without_looking_for_it(tmp_path: Path) -> None:
    from torch.utils.serialization import config

    content = {"a": torch.arange(5), "empty": torch.empty(0), "b": [torch.arange(70.0), torch.tensor(True)]}
    path = tmp_path / "dump.pt"
    path.write_bytes(saved(content))
    config.load.calculate_storage_offsets = True
    try:
        loaded = torch.load(path, weights_only=True, mmap=True)
    finally:
        config.load.calculate_storage_offsets = False
    assert differences(loaded, content) == []


def test_more_records_than_a_first_archive_could_have() -> None:
    out = io.BytesIO()
    archive = Archive(out.write)
    data, (tensor,) = pickled({"a": torch.arange(5)})
    for extra in range(66_000):
        archive.add(f"extra/{extra}", b"x")
    for name, record in (("data.pkl", data), ("byteorder", b"little"), ("version", b"3\n")):
        archive.add(name, record)
    archive.add("data/0", tensor.numpy().tobytes())
    archive.end()

    out.seek(0)
    assert torch.equal(torch.load(out, weights_only=True)["a"], tensor)
    with zipfile.ZipFile(out) as records:
        assert len(records.namelist()) == 66_004


def test_a_file_beyond_four_gigabytes(tmp_path: Path) -> None:
    large = torch.zeros(2**32 + 5, dtype=torch.uint8)
    path = tmp_path / "dump.pt"
    with path.open("wb") as file:

        def write_sparsely(data: bytes | memoryview) -> None:
            if len(data) == large.numel():
                file.seek(len(data), io.SEEK_CUR)
            else:
                file.write(data)

        shares = [*save({"large": large, "last": torch.arange(7)}, write_sparsely)]

    assert shares == [0.5, 1]
    loaded = torch.load(path, weights_only=True, mmap=True)

    assert loaded["large"].shape == large.shape
    assert int(loaded["large"][-1]) == 0
    assert torch.equal(loaded["last"], torch.arange(7))
    with zipfile.ZipFile(path) as records:
        assert records.getinfo("archive/data/0").file_size == large.numel()
        assert records.getinfo("archive/data/1").header_offset > large.numel()


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.nn.Parameter(torch.ones(1)), np.float64(1.0), range(3)])
def test_what_a_dump_cannot_hold_is_refused(value: object) -> None:
    for content in (value, [value], {"a": (1, value)}):
        with pytest.raises(TypeError, match="a dump cannot hold"):
            next(save(content, lambda data: None))
