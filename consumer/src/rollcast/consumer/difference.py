"""Where two dumps differ, bit for bit or within a tolerance."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from rollcast.schemas.sizes import counted
from rollcast.schemas.tensors import tensor_bytes


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where two values differ.

    Attributes:
        where: path to it, such as `samples[3] log_probs`.
        what: how they differ.
    """

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True, slots=True)
class _Tolerance:
    rtol: float
    atol: float

    @property
    def exact(self) -> bool:
        return self.rtol == 0 and self.atol == 0


def differences(
    a: object, b: object, *, rtol: float = 0.0, atol: float = 0.0, limit: int | None = None
) -> list[Difference]:
    """Returns where two payloads differ, in order, at most `limit` places; an empty list means equal.

    Types, dtypes, shapes and the order of keys always count. Without a tolerance, numbers are compared bit for bit:
    a NaN equals the same NaN, and -0.0 is not 0.0. With one, floating-point values may differ by
    `atol + rtol * abs(b)`, and a NaN equals any NaN.
    """
    return list(islice(_compare("", a, b, _Tolerance(rtol, atol)), limit))


def _compare(where: str, a: Any, b: Any, tolerance: _Tolerance) -> Iterator[Difference]:
    if type(a) is not type(b):
        yield Difference(where, f"{_shown(a)} is a {type(a).__name__}, {_shown(b)} a {type(b).__name__}")
    elif isinstance(a, torch.Tensor):
        yield from _compare_tensors(where, a, b, tolerance)
    elif isinstance(a, dict):
        yield from _compare_dicts(where, a, b, tolerance)
    elif isinstance(a, (list, tuple)):
        if len(a) != len(b):
            yield Difference(where, f"{counted(len(a), 'entry', 'entries')} against {len(b)}")
        for index, (left, right) in enumerate(zip(a, b, strict=False)):
            yield from _compare(f"{where}[{index}]", left, right, tolerance)
    elif isinstance(a, float):
        if not _floats_equal(a, b, tolerance):
            yield Difference(where, f"{a!r} against {b!r}")
    elif a != b:
        yield Difference(where, f"{_shown(a)} against {_shown(b)}")


def _compare_dicts(where: str, a: dict[Any, Any], b: dict[Any, Any], tolerance: _Tolerance) -> Iterator[Difference]:
    for key in a:
        if key not in b:
            yield Difference(_inside(where, key), "is only in the first")
        else:
            yield from _compare(_inside(where, key), a[key], b[key], tolerance)
    for key in b:
        if key not in a:
            yield Difference(_inside(where, key), "is only in the second")
    if a.keys() == b.keys() and [*map(_typed, a)] != [*map(_typed, b)]:
        yield Difference(where, "the keys differ in type or order")


def _compare_tensors(where: str, a: torch.Tensor, b: torch.Tensor, tolerance: _Tolerance) -> Iterator[Difference]:
    if a.dtype != b.dtype or a.shape != b.shape:
        yield Difference(where, f"{a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}")
        return
    if a.is_floating_point() and not tolerance.exact:
        left, right = a.to(torch.float64), b.to(torch.float64)
        equal = torch.isclose(left, right, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True)
    else:
        left, right = (tensor_bytes(each).reshape(-1, each.element_size()) for each in (a, b))
        equal = (left == right).all(1).reshape(a.shape)
    unequal = (~equal).nonzero()
    if len(unequal):
        at = tuple(unequal[0].tolist())
        yield Difference(
            where,
            f"{len(unequal)} of {a.numel()} elements differ, first at {list(at)}: {a[at].item()!r} against "
            f"{b[at].item()!r}{_largest(a, b)}",
        )


def _largest(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.dtype is torch.bool or a.is_complex():
        return ""
    distance = (a.to(torch.float64) - b.to(torch.float64)).abs()
    finite = distance[distance.isfinite()]
    return f", largest distance {finite.max().item():.6g}" if len(finite) else ""


def _floats_equal(a: float, b: float, tolerance: _Tolerance) -> bool:
    if struct.pack("<d", a) == struct.pack("<d", b):
        return True
    if tolerance.exact:
        return False
    return (a != a and b != b) or abs(a - b) <= tolerance.atol + tolerance.rtol * abs(b)


def _inside(where: str, key: object) -> str:
    if where == "":
        return str(key)
    return f"{where} {key}"


def _typed(key: object) -> tuple[str, object]:
    return type(key).__name__, key


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, torch.Tensor) else f"tensor {tuple(value.shape)}"
    return text if len(text) <= 60 else f"{text[:57]}..."
