"""What is saved loads as what `torch.save` saves, and its records are those of torch."""

import io
import pickle
import zipfile
from dataclasses import dataclass
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


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.nn.Parameter(torch.ones(1)), np.float64(1.0), range(3)])
def test_what_a_dump_cannot_hold_is_refused(value: object) -> None:
    for content in (value, [value], {"a": (1, value)}):
        with pytest.raises(TypeError, match="a dump cannot hold"):
            next(save(content, lambda data: None))
