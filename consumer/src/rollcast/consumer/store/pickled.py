"""The content of a dump as the pickle in a file of `torch.save`.

torch's pickler calls Python for every object, some twenty for a tensor. A dump holds nothing but tensors and plain
values: the few opcodes that they take are written here, long lists of plain values by the standard library.
"""

from collections.abc import Callable, Iterable, Mapping
from io import BytesIO
from pickle import Pickler
from struct import Struct
from typing import Any

import torch

_PROTOCOL = 2
_BEGIN, _END = b"\x80\x02", b"."
# Older dtypes are told by the type of the storage; all others stand beside a storage of bytes.
_STORAGES = {
    torch.bool: "BoolStorage",
    torch.uint8: "ByteStorage",
    torch.int8: "CharStorage",
    torch.int16: "ShortStorage",
    torch.int32: "IntStorage",
    torch.int64: "LongStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.float32: "FloatStorage",
    torch.float64: "DoubleStorage",
    torch.complex64: "ComplexFloatStorage",
    torch.complex128: "ComplexDoubleStorage",
}

_uint32, _int32, _double = Struct("<I").pack, Struct("<i").pack, Struct(">d").pack


def pickled(content: object) -> tuple[bytes, list[torch.Tensor]]:
    """Returns the pickle of a dump's content, and the tensors whose bytes it expects as `data/0`, `data/1` and so on.

    Each tensor is told as if it filled a storage of its own without gaps.

    Args:
        content: tensors, plain values, and dicts, lists and tuples of them, all of exactly these types.

    Raises:
        TypeError: there is something else in it.
    """
    pickling = _Pickling()
    pickling.add(content)
    return b"".join((_BEGIN, *pickling.pieces, _END)), pickling.tensors


class _Pickling:
    """A pickle that is being made.

    Attributes:
        pieces: of its bytes.
        tensors: that it refers to.
    """

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.tensors: list[torch.Tensor] = []
        self._references: dict[bytes, bytes] = {}
        self._places: dict[tuple[torch.dtype, torch.Size], bytes] = {}

    def add(self, value: Any) -> None:
        kind = type(value)
        if kind in _WRITERS:
            self.pieces.append(_WRITERS[kind](value))
        elif kind is torch.Tensor:
            self._add_tensor(value)
        elif kind is dict:
            self._add_map(value)
        elif kind in (list, tuple):
            self._add_items(value)
        else:
            raise TypeError(f"a dump cannot hold a {kind.__module__}.{kind.__qualname__}")

    def _add_map(self, items: Mapping[object, object]) -> None:
        self.pieces.append(b"}(")
        for key, item in items.items():
            # The names of columns are the same in every sample.
            if type(key) is str:
                self.pieces.append(self._once(_text(key)))
            else:
                self.add(key)
            self.add(item)
        self.pieces.append(b"u")

    def _add_items(self, items: list[object] | tuple[object, ...]) -> None:
        if _is_for_library(items):
            self.pieces.append(_by_library(items))
            return
        begin, end = (b"](", b"e") if type(items) is list else (b"(", b"t")
        self.pieces.append(begin)
        for item in items:
            self.add(item)
        self.pieces.append(end)

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        once, key, storage = self._once, str(len(self.tensors)), _STORAGES.get(tensor.dtype)
        self.tensors.append(tensor)
        kind = (tensor.dtype, tensor.shape)
        place = self._places.get(kind)
        if place is None:
            place = self._places[kind] = _place(tensor)
        # rebuild(("storage", type, key, location, elements), offset, size, stride, requires_grad, hooks[, dtype])
        self.pieces += (
            once(_global("torch._utils", "_rebuild_tensor_v2" if storage else "_rebuild_tensor_v3")),
            b"((",
            once(_text("storage")),
            once(_global("torch", storage) if storage else _global("torch.storage", "UntypedStorage")),
            _text(key),
            once(_text("cpu")),
            place,
            once(_global("collections", "OrderedDict")),
            b")R",
            b"" if storage else once(_global(*str(tensor.dtype).split("."))),
            b"tR",
        )

    def _once(self, piece: bytes) -> bytes:
        """Returns a piece as it is the first time, then as a reference to what it made."""
        reference = self._references.get(piece)
        if reference is not None:
            return reference
        number = _uint32(len(self._references))
        self._references[piece] = b"j" + number
        return piece + b"r" + number


def _place(tensor: torch.Tensor) -> bytes:
    elements = tensor.numel() if tensor.dtype in _STORAGES else tensor.nbytes
    stride = torch.empty(tensor.shape, device="meta").stride()
    shape = _by_library(tuple(tensor.shape))
    return b"".join((_int(elements), b"tQ", _int(0), shape, _by_library(stride), _bool(False)))


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _bool(value: bool) -> bytes:
    return b"\x88" if value else b"\x89"


def _int(value: int) -> bytes:
    return b"J" + _int32(value) if -(2**31) <= value < 2**31 else _by_library(value)


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + _uint32(len(data)) + data


def _bytes(data: bytes) -> bytes:
    # For none the library calls `bytes`, which torch.load(weights_only=True) refuses.
    return _global("_codecs", "encode") + _text(data.decode("latin1")) + _text("latin1") + b"\x86R"


def _by_library(value: object) -> bytes:
    out = BytesIO()
    pickler = Pickler(out, _PROTOCOL)
    # Without references of its own, whose numbers would be those of others.
    pickler.fast = True
    pickler.dump(value)
    return out.getvalue()[len(_BEGIN) : -len(_END)]


_WRITERS: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda _: b"N",
    bool: _bool,
    int: _int,
    float: lambda value: b"G" + _double(value),
    str: _text,
    bytes: _bytes,
}
_OF_LIBRARY = _WRITERS.keys() - {bytes}


def _is_for_library(values: Iterable[object]) -> bool:
    return _OF_LIBRARY.issuperset(map(type, values))
