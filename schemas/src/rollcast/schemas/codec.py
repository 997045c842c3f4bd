"""Bytes of a tensor to bytes on the wire and back: byte shuffle and zstd where they pay."""

import threading

import numpy as np
import numpy.typing as npt
import zstandard

from rollcast.schemas.errors import DecodeError

RAW, ZSTD, SHUFFLE_ZSTD, SPOOL = "RAW", "ZSTD", "SHUFFLE_ZSTD", "SPOOL"

_LEVEL = 1
_PAYS_BELOW = 0.97
_WORTH_TRYING_BYTES = 64
_MAX_WINDOW_BYTES = 8 * 1024 * 1024


class _Contexts(threading.local):
    """zstd contexts must not be shared by threads."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)


_contexts = _Contexts()


def compress(raw: bytes | memoryview, item_bytes: int) -> tuple[str, bytes | memoryview]:
    """Returns `(codec, data)` for little-endian elements of `item_bytes` each; `raw` itself where nothing is saved."""
    if len(raw) < _WORTH_TRYING_BYTES:
        return RAW, raw
    shuffled = item_bytes > 1
    data = _contexts.compressor.compress(_shuffle(raw, item_bytes) if shuffled else raw)
    if len(data) > len(raw) * _PAYS_BELOW:
        return RAW, raw
    return (SHUFFLE_ZSTD if shuffled else ZSTD), data


def decompress_into(out: npt.NDArray[np.uint8], codec: str, data: bytes | memoryview, item_bytes: int) -> None:
    """Fills `out`, whose size is the claimed and already capped size of the slice.

    Raises:
        DecodeError: `data` is not exactly that many bytes in that codec; found from the frame header where possible.
    """
    if codec == RAW:
        if len(data) != out.size:
            raise DecodeError(f"a raw slice has {len(data)} bytes where {out.size} were announced")
        out[:] = np.frombuffer(data, np.uint8)
        return
    if codec not in (ZSTD, SHUFFLE_ZSTD):
        raise DecodeError(f"codec {codec} has no place on the wire")
    plain = np.frombuffer(_decompress(data, out.size), np.uint8)
    if codec == ZSTD:
        out[:] = plain
    elif out.size % item_bytes:
        raise DecodeError(f"a slice of {out.size} bytes is no whole number of {item_bytes}-byte elements")
    else:
        out.reshape(-1, item_bytes)[:] = plain.reshape(item_bytes, -1).T


def _shuffle(raw: bytes | memoryview, item_bytes: int) -> memoryview:
    return np.ascontiguousarray(np.frombuffer(raw, np.uint8).reshape(-1, item_bytes).T).reshape(-1).data


def _decompress(data: bytes | memoryview, size: int) -> bytes:
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
