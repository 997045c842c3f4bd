"""Python values of `rollout_data` to columns and back; the only place where the wire meets torch."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from rollcast.schemas._values import has_too_many_numbers
from rollcast.schemas.codec import RAW
from rollcast.schemas.dtypes import ITEM_BYTES
from rollcast.schemas.errors import DecodeError
from rollcast.schemas.events import Column, PlainValue, TensorRef, TensorSlice

_MAX_NESTING = 32
_MAX_INT = 2**63
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES if hasattr(torch, name)}
_SCALARS = {type(None), bool, int, float, str, bytes}
_FIXED_SCALARS = {type(None), bool, float}
_KIND = attrgetter("layout", "dtype", "requires_grad", "is_meta")
_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in _DTYPES.items()}

UNSUPPORTED_KEY = "__rollcast_unsupported__"
"""Key of the marker that stands for a value the contract cannot carry: `{UNSUPPORTED_KEY: "type name"}`."""

_log = logging.getLogger("rollcast.schemas")


# Of the process, because the same field has such values in every rollout; few, because names may come from anywhere.
_warned_fields: set[str] = set()
_MAX_WARNED_FIELDS = 1000


class Replaced:
    """Counts the values that a marker stands for; warns once for each field in a process, and of few fields.

    Attributes:
        count: values replaced so far.
    """

    def __init__(self) -> None:
        self.count = 0

    def marker(self, field: str, value: object) -> dict[str, str]:
        """Returns the marker for `value`, which stood in `field`."""
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        self.count += 1
        if field not in _warned_fields and len(_warned_fields) < _MAX_WARNED_FIELDS:
            _warned_fields.add(field)
            what = "an integer beyond signed 64 bits" if isinstance(value, int) else f"a value of type {name}"
            _log.warning(
                "field %r: %s cannot be carried; a marker stands in its place. "
                "Remove it from rollout_data or convert it to tensors and plain values",
                field,
                what,
            )
        return {UNSUPPORTED_KEY: name}


def type_of_marked(value: object) -> str | None:
    """Returns the name of the type for which a marker stands; None if `value` is no marker."""
    if not isinstance(value, dict) or list(value) != [UNSUPPORTED_KEY]:
        return None
    name = value[UNSUPPORTED_KEY]
    # Not of a subclass, such as numpy's, nor what is no text: it goes into a dump as it is.
    return name if type(name) is str and _is_unicode(name) else None


def normalise(field: str, value: object, replaced: Replaced) -> Any:
    """Returns `value` as the dump contract holds it.

    NumPy scalars become Python scalars and NumPy arrays tensors; subclasses of the plain types become the plain type;
    tensors are detached but neither moved nor copied; what cannot be carried becomes a marker.
    """
    return _normalise(field, value, replaced, _MAX_NESTING)


def _normalise(field: str, value: object, replaced: Replaced, room: int) -> Any:
    if isinstance(value, torch.Tensor):
        tensor = _plain_tensor(value)
        return replaced.marker(field, value) if tensor is None else tensor
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        return _from_numpy(field, value, replaced)
    if isinstance(value, int):
        return int(value) if -_MAX_INT <= value < _MAX_INT else replaced.marker(field, value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value) if _is_unicode(value) else replaced.marker(field, value)
    if isinstance(value, bytes):
        return bytes(value)
    if type_of_marked(value) is not None:
        return value
    if room == 0:
        return replaced.marker(field, value)
    if isinstance(value, dict):
        keys = [_key(key) for key in value]
        if any(key is _NO_KEY for key in keys) or has_too_many_numbers(keys):
            return replaced.marker(field, value)
        items = [_normalise(field, item, replaced, room - 1) for item in value.values()]
        return dict(zip(keys, items, strict=True))
    if isinstance(value, (list, tuple, range)):
        kept = _are_plain(value)
        items = [*value] if kept else [_normalise(field, item, replaced, room - 1) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return replaced.marker(field, value)


def _are_plain(values: Sequence[Any]) -> bool:
    """Returns whether all are carried as they are; there may be thousands, on the training thread."""
    types = {*map(type, values)}
    if types == {int}:
        return bool(min(values) >= -_MAX_INT and max(values) < _MAX_INT)
    return types <= _FIXED_SCALARS or (types == {torch.Tensor} and _are_plain_tensors(values))


def _are_plain_tensors(values: Sequence[torch.Tensor]) -> bool:
    kinds = {*map(_KIND, values)}
    if any(map(torch.Tensor.is_neg, values)):
        return False
    if any(dtype.is_complex for _, dtype, _, _ in kinds) and any(map(torch.Tensor.is_conj, values)):
        return False
    return all(
        layout is torch.strided and dtype in _NAMES and not (has_grad or is_meta)
        for layout, dtype, has_grad, is_meta in kinds
    )


def are_scalars(values: Iterable[object]) -> bool:
    """Returns whether none of normalised values has others inside."""
    return _SCALARS.issuperset(map(type, values))


def _plain_tensor(value: torch.Tensor) -> torch.Tensor | None:
    tensor = value.detach()
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return None
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor if _are_plain_tensors([tensor]) else None


def _from_numpy(field: str, value: Any, replaced: Replaced) -> Any:
    if isinstance(value, np.generic):
        scalar = value.item()
        # item() of a type that Python lacks returns a NumPy scalar again, or a datetime, complex or tuple.
        plain = isinstance(scalar, (bool, int, float, str, bytes)) and not isinstance(scalar, np.generic)
        return _normalise(field, scalar, replaced, _MAX_NESTING) if plain else replaced.marker(field, value)
    try:
        # A copy: torch wants native byte order, positive strides and writable memory.
        return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C"))
    except TypeError:
        return replaced.marker(field, value)


_NO_KEY = object()


def _key(key: object) -> object:
    if key is None or isinstance(key, bool):
        return key
    if isinstance(key, np.generic):
        key = key.item()
    if isinstance(key, int):
        return int(key) if -_MAX_INT <= key < _MAX_INT else _NO_KEY
    if isinstance(key, float):
        return float(key)
    if isinstance(key, str):
        return str.__str__(key) if _is_unicode(key) else _NO_KEY
    return bytes(key) if isinstance(key, bytes) else _NO_KEY


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def item_count(value: object, limit: int) -> int:
    """Returns the number of values inside a list, tuple or map; stops counting above `limit`."""
    if not isinstance(value, (list, tuple, dict)):
        return 0
    count = len(value)
    inner = value.values() if isinstance(value, dict) else value
    for item in () if are_scalars(inner) else inner:
        if count > limit:
            break
        count += item_count(item, limit - count)
    return count


def flatten(name: str, value: object) -> list[tuple[Column, torch.Tensor | None]]:
    """Returns the columns of a normalised value, each with the tensor whose bytes it announces.

    The column of a tensor has no data yet and the codec `RAW`; `tensor_bytes` gives the data.
    """
    if isinstance(value, torch.Tensor):
        return [(Column(name, 0, announce(value.dtype, tuple(value.shape))), value)]
    tensors: list[torch.Tensor] = []
    plain = extract_tensors(value, tensors)
    inner = [
        (Column(name, leaf, announce(tensor.dtype, tuple(tensor.shape))), tensor)
        for leaf, tensor in enumerate(tensors, start=1)
    ]
    return [(Column(name, 0, plain), None), *inner]


def extract_tensors(value: Any, tensors: list[torch.Tensor]) -> PlainValue:
    """Returns a copy of a normalised value in which each tensor is a reference to its place in `tensors`, from 1."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return TensorRef(len(tensors))
    if isinstance(value, dict):
        return {key: extract_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return value[:] if are_scalars(value) else [extract_tensors(item, tensors) for item in value]
    if isinstance(value, tuple):
        return tuple(extract_tensors(item, tensors) for item in value)
    plain: PlainValue = value
    return plain


def announce(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorSlice:
    """Returns the slice that announces a whole tensor, without its data."""
    total = prod(shape) * dtype.itemsize
    return TensorSlice(
        dtype=_NAMES[dtype], shape=shape, total_bytes=total, offset=0, slice_bytes=total, codec=RAW, data=b""
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name by which a dtype travels."""
    return _NAMES[dtype]


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a strided tensor as a flat uint8 tensor on its device; a view where it is contiguous.

    Raises:
        RuntimeError: its storage was cut, and ends before the tensor does.
    """
    if not tensor.is_contiguous():
        # A copy would read beyond a storage that was cut; this looks whether it reaches so far.
        tensor = tensor.as_strided(tensor.size(), tensor.stride())
    # Not reshaped: of one element any stride is contiguous, and `view` wants 1.
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8, device=tensor.device)


def unflatten(columns: Sequence[Column], *, copy: bool = True) -> dict[str, Any]:
    """Returns the values by name; inverse of `flatten` over all columns of a slot, in their order.

    Args:
        columns: complete, with their data.
        copy: whether tensors get memory of their own. If not, each stands in the data of its column, which must be
            writable, and its storage is exactly that.

    Raises:
        DecodeError: a column that repeats, a reference without its tensor, or a dtype that this torch lacks.
    """
    tensors: dict[tuple[str, int], torch.Tensor] = {}
    plain: dict[str, Any] = {}
    for column in columns:
        key = (column.name, column.leaf)
        if key in tensors or (column.leaf == 0 and column.name in plain):
            raise DecodeError(f"column {column.name!r} stands twice in one slot")
        if isinstance(column.value, TensorSlice):
            tensors[key] = _to_tensor(column.name, column.value, copy)
        elif column.leaf:
            raise DecodeError(f"column {column.name!r}: leaf {column.leaf} is not a tensor")
        if column.leaf == 0:
            plain[column.name] = tensors.get(key, column.value)
    unused = {key for key in tensors if key[1]}
    values = {name: _restore(name, value, tensors, unused) for name, value in plain.items()}
    if unused:
        name, leaf = min(unused)
        raise DecodeError(f"tensor {leaf} of column {name!r} has no place in it")
    return values


def _to_tensor(name: str, whole: TensorSlice, copy: bool) -> torch.Tensor:
    dtype = _DTYPES.get(whole.dtype)
    if dtype is None:
        raise DecodeError(f"column {name!r} has dtype {whole.dtype}, which this torch does not have; upgrade torch")
    if not whole.total_bytes:
        return torch.empty(whole.shape, dtype=dtype)
    data = np.frombuffer(whole.data, np.uint8).copy() if copy else whole.data
    flat = torch.frombuffer(data, dtype=dtype)
    return flat if len(whole.shape) == 1 else flat.reshape(whole.shape)


def _restore(name: str, value: Any, tensors: dict[tuple[str, int], torch.Tensor], unused: set[tuple[str, int]]) -> Any:
    if isinstance(value, TensorRef):
        # Each has one place: a tensor that many references share would be copied for each of them.
        if (name, value.leaf) not in unused:
            raise DecodeError(f"column {name!r} refers to tensor {value.leaf}, which is not there, or used already")
        unused.remove((name, value.leaf))
        return tensors[name, value.leaf]
    if isinstance(value, dict):
        return {key: _restore(name, item, tensors, unused) for key, item in value.items()}
    if isinstance(value, list):
        return [_restore(name, item, tensors, unused) for item in value]
    if isinstance(value, tuple):
        return tuple(_restore(name, item, tensors, unused) for item in value)
    return value


def columns_of(values: Iterable[tuple[str, object]]) -> list[Column]:
    """Returns the complete columns of normalised values, with their data, for content that is already on the CPU."""
    columns = []
    for name, value in values:
        for column, tensor in flatten(name, value):
            if tensor is not None and isinstance(column.value, TensorSlice):
                data = tensor_bytes(tensor.cpu()).numpy().data
                column = Column(name, column.leaf, replace(column.value, data=data))
            columns.append(column)
    return columns
