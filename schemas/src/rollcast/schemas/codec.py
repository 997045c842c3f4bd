"""Bytes of a tensor to bytes on the wire and back: the bytes of equal weight together, each such plane as it pays.

`PLANES`: for each byte of an element, lowest first, one plane: a mode byte, then either the plane as it is, or the one
byte that it repeats, or a little-endian uint32 length and a zstd frame. `DELTA_PLANES`: the planes of the differences
of the elements, as unsigned integers, from those of another slice; zigzag-coded, so that small ones have zero bytes.
"""

import threading
from collections.abc import Sequence
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from rollcast.schemas.errors import DecodeError

RAW, PLANES, DELTA_PLANES, SPOOL = "RAW", "PLANES", "DELTA_PLANES", "SPOOL"

Bytes = npt.NDArray[np.uint8]

_AS_IT_IS, _REPEATED, _ZSTD = 0, 1, 2
_PAYS_BELOW = 0.97
_WORTH_A_FRAME_BYTES = 64
_LENGTH_BYTES = 4
_MAX_WINDOW_BYTES = 8 * 1024 * 1024
_WIDEST_UNIT_BYTES = 8
_DELTA_TYPES = {2: "<u2", 4: "<u4", 8: "<u8"}


class _Contexts(threading.local):
    """zstd contexts must not be shared by threads."""

    def __init__(self) -> None:
        # A plane of a float column has skewed bytes but no repeated strings: a search for those costs half of the
        # speed and finds none. The smallest table and the longest match leave the entropy coder and runs.
        parameters = zstandard.ZstdCompressionParameters.from_level(1, hash_log=6, min_match=7)
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)


_contexts = _Contexts()


def compress(
    raw: bytes | memoryview, item_bytes: int, base: bytes | memoryview | None = None
) -> tuple[str, bytes | memoryview]:
    """Returns `(codec, data)` for little-endian elements of `item_bytes` each; `raw` itself where nothing is saved.

    Args:
        raw: whole elements.
        item_bytes: size of one.
        base: as many bytes, whose elements may be close to those of `raw`; the reader must have them too.
    """
    if len(raw) < _WORTH_A_FRAME_BYTES:
        return RAW, raw
    codec, planes = PLANES, _planes(np.frombuffer(raw, np.uint8), item_bytes)
    if base is not None and item_bytes in _DELTA_TYPES and len(base) == len(raw):
        differences = _planes(_differences(raw, base, _DELTA_TYPES[item_bytes]), item_bytes)
        if _are_smaller(differences, planes, len(raw) // item_bytes):
            codec, planes = DELTA_PLANES, differences
    data = b"".join(piece for plane in planes for piece in _encoded_plane(plane))
    return (codec, data) if len(data) <= len(raw) * _PAYS_BELOW else (RAW, raw)


def decompress_into(
    out: Bytes, codec: str, data: bytes | memoryview, item_bytes: int, base: Bytes | None = None
) -> None:
    """Fills `out`, whose size is the claimed and already capped size of the slice.

    Args:
        out: contiguous.
        codec: of `data`.
        data: untrusted.
        item_bytes: size of one element.
        base: decoded bytes of the slice that `DELTA_PLANES` refers to.

    Raises:
        DecodeError: `data` is not exactly that many bytes in that codec; found from frame headers where possible.
    """
    if codec == RAW:
        if len(data) != out.size:
            raise DecodeError(f"a raw slice has {len(data)} bytes where {out.size} were announced")
        out[:] = np.frombuffer(data, np.uint8)
        return
    if codec not in (PLANES, DELTA_PLANES):
        raise DecodeError(f"codec {codec} has no place on the wire")
    if out.size % item_bytes:
        raise DecodeError(f"a slice of {out.size} bytes is no whole number of {item_bytes}-byte elements")
    _read_planes(out, memoryview(data), item_bytes)
    if codec == DELTA_PLANES:
        if item_bytes not in _DELTA_TYPES:
            raise DecodeError(f"elements of {item_bytes} bytes cannot be differences")
        if base is None or base.size != out.size:
            raise DecodeError("a slice of differences names no slice of its size to add them to")
        _add_to(out, base, _DELTA_TYPES[item_bytes])


def _planes(raw: Bytes, item_bytes: int) -> list[Bytes | int]:
    """Returns each plane, or the byte that it repeats."""
    # Found without the planes themselves: a bit that no element has, or all have, is the same in each.
    elements = _elements(raw, item_bytes)
    in_all = np.bitwise_and.reduce(elements, axis=0).view(np.uint8)
    in_any = np.bitwise_or.reduce(elements, axis=0).view(np.uint8)
    return [
        int(in_all[place]) if in_all[place] == in_any[place] else np.ascontiguousarray(raw[place::item_bytes])
        for place in range(item_bytes)
    ]


def _elements(raw: Bytes, item_bytes: int) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Returns the same memory, an element a row, in as few unsigned integers as it takes."""
    unit = gcd(item_bytes, _WIDEST_UNIT_BYTES)
    return raw.view(f"<u{unit}").reshape(-1, item_bytes // unit)


def _are_smaller(differences: Sequence[Bytes | int], own: Sequence[Bytes | int], count: int) -> bool:
    """Returns whether fewer bytes differ from zero than, of the elements themselves, from their plane's first."""
    nonzero = sum(count * (plane != 0) if isinstance(plane, int) else np.count_nonzero(plane) for plane in differences)
    return bool(nonzero < sum(np.count_nonzero(plane != plane[0]) for plane in own if not isinstance(plane, int)))


def _encoded_plane(plane: Bytes | int) -> tuple[bytes | memoryview, ...]:
    if isinstance(plane, int):
        return (bytes((_REPEATED, plane)),)
    if plane.size >= _WORTH_A_FRAME_BYTES:
        frame = _contexts.compressor.compress(plane.data)
        if len(frame) + _LENGTH_BYTES <= plane.size * _PAYS_BELOW:
            return bytes((_ZSTD,)), len(frame).to_bytes(_LENGTH_BYTES, "little"), frame
    return bytes((_AS_IT_IS,)), plane.data


def _read_planes(out: Bytes, data: memoryview, item_bytes: int) -> None:
    count = out.size // item_bytes
    position = 0

    def take(size: int) -> memoryview:
        nonlocal position
        if size > len(data) - position:
            raise DecodeError(f"a slice ends at byte {len(data)} where {size} more follow byte {position}")
        position += size
        return data[position - size : position]

    repeated = bytearray(item_bytes)
    planes: dict[int, bytes | memoryview] = {}
    for place in range(item_bytes):
        mode = take(1)[0]
        if mode == _REPEATED:
            repeated[place] = take(1)[0]
        elif mode == _AS_IT_IS:
            planes[place] = take(count)
        elif mode == _ZSTD:
            planes[place] = _decompress(take(int.from_bytes(take(_LENGTH_BYTES), "little")), count)
        else:
            raise DecodeError(f"a plane has the unknown mode {mode}")
    if position != len(data):
        raise DecodeError(f"{len(data) - position} bytes follow the last plane of a slice")
    if len(planes) < item_bytes:
        # Whole elements, which is many times faster than a byte of each.
        _elements(out, item_bytes)[:] = _elements(np.frombuffer(repeated, np.uint8), item_bytes)
    for place, plane in planes.items():
        out[place::item_bytes] = np.frombuffer(plane, np.uint8)


def _differences(raw: bytes | memoryview, base: bytes | memoryview, unsigned: str) -> Bytes:
    # Modulo 2**bits, so that every bit pattern comes back, NaN payloads included. Close floats of one sign are close
    # integers.
    difference = np.subtract(np.frombuffer(raw, unsigned), np.frombuffer(base, unsigned)).view(
        unsigned.replace("u", "i")
    )
    sign = difference >> (8 * difference.itemsize - 1)
    np.left_shift(difference, 1, out=difference)
    np.bitwise_xor(difference, sign, out=difference)
    coded: Bytes = difference.view(np.uint8)
    return coded


def _add_to(out: Bytes, base: Bytes, unsigned: str) -> None:
    coded = out.view(unsigned)
    sign = np.negative(coded & 1)
    np.right_shift(coded, 1, out=coded)
    np.bitwise_xor(coded, sign, out=coded)
    np.add(coded, base.view(unsigned), out=coded)


def _decompress(data: memoryview, size: int) -> bytes:
    try:
        claimed = zstandard.frame_content_size(data)
        # A frame that claims nothing is believed by the decoder, whatever follows its header.
        if claimed not in (-1, size) or not claimed:
            raise DecodeError(f"a zstd frame claims {claimed} bytes where {size} were announced")
        # One byte of room more than announced tells a longer frame without a content size from an exact one.
        plain = _contexts.decompressor.decompress(data, max_output_size=size + 1, allow_extra_data=False)
    except zstandard.ZstdError as exc:
        raise DecodeError(f"a slice is no valid zstd frame: {exc}") from exc
    if len(plain) != size:
        raise DecodeError(f"a zstd frame holds {len(plain)} bytes where {size} were announced")
    return plain
