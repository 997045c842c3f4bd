"""Moves bytes from wherever the trainer's tensors are to the mapped tensor file."""

import ctypes
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from rollcast.producer.plan import Segments
from rollcast.schemas.tensors import tensor_bytes

_NBYTES, _IS_CPU = attrgetter("nbytes"), attrgetter("is_cpu")

# Its functions carry no types.
_cuda: Any = torch.cuda

_PORTABLE = 1
# Of each device that a shard has come from, in that order.
_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def join(sources: tuple[torch.Tensor, ...], dtype: torch.dtype, target: torch.Tensor) -> bool:
    """Copies whole tensors to the target, side by side, in one call; tells whether it could, and has.

    It cannot where one is on a device or has no bytes, and where torch would make other bytes or has no place for them.

    Args:
        sources: with one dimension each.
        dtype: of each.
        target: uint8, on the CPU, as many bytes.

    Raises:
        ValueError: the sources are not as many bytes.
    """
    # It makes 1 of every other byte than 0 in a bool.
    if dtype is torch.bool or target.storage_offset() % dtype.itemsize or not all(map(_IS_CPU, sources)):
        return False
    # A tensor whose storage was freed (`resize_(0)`) keeps its size; reading it would end the process.
    if not all(map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, sources))):
        return False
    out = target.view(dtype)
    torch.cat(sources, out=out)
    if out.nbytes != target.nbytes:
        raise ValueError(f"tensors of {out.nbytes} bytes do not hold the {target.nbytes} that were planned")
    return True


def move(sources: Sequence[torch.Tensor], segments: Segments, data: torch.Tensor) -> None:
    """Copies segments of the sources to their places; returns when all bytes are there.

    From a CUDA device the copies go through a stream of their own, after what the device's current stream has to do,
    and are waited for once, at the end; into pinned memory (`pin`) the device writes by itself.

    Args:
        sources: anywhere.
        segments: of them.
        data: the target, uint8, on the CPU.

    Raises:
        ValueError: a segment is not within source and target.
    """
    # A tensor whose storage was freed (`resize_(0)`) keeps its size; reading it would end the process.
    stored = np.array([storage.nbytes() for storage in map(torch.Tensor.untyped_storage, sources)], np.int64)
    held = np.where(stored > 0, np.array([*map(_NBYTES, sources)], np.int64), 0)[segments.tensors]
    lowest = min(array.min(initial=0) for array in (segments.starts, segments.targets, segments.sizes))
    is_beyond = (segments.starts + segments.sizes > held) | (segments.targets + segments.sizes > data.nbytes)
    if lowest < 0 or is_beyond.any():
        raise ValueError(f"a tensor does not hold what was planned, or its place is beyond {data.nbytes} bytes")
    # Not with torch, whose two views and one copy for each segment take several times as long as the bytes.
    addresses = np.array([*map(torch.Tensor.data_ptr, sources)], np.int64)
    if not (all(map(_IS_CPU, sources)) and all(map(torch.Tensor.is_contiguous, sources))):
        addresses *= np.array([source.is_cpu and source.is_contiguous() for source in sources], np.int64)
    addresses = addresses[segments.tensors]
    plain = addresses != 0
    targets, starts, sizes = data.data_ptr() + segments.targets, addresses + segments.starts, segments.sizes
    deque(map(ctypes.memmove, *(array[plain].tolist() for array in (targets, starts, sizes))), maxlen=0)
    if not plain.all():
        _copy_others(sources, segments, plain, data)


def _copy_others(
    sources: Sequence[torch.Tensor], segments: Segments, done: "np.ndarray[Any, Any]", data: torch.Tensor
) -> None:
    streams: dict[torch.device, torch.cuda.Stream] = {}
    try:
        with ExitStack() as current:
            for is_done, (tensor, target, start, size) in zip(done.tolist(), segments.as_tuples(), strict=True):
                if is_done:
                    continue
                source = sources[tensor]
                if source.is_cuda and source.device not in streams:
                    stream = streams[source.device] = _side_stream(source.device)
                    stream.wait_stream(torch.cuda.current_stream(source.device))
                    current.enter_context(torch.cuda.stream(stream))
                data[target : target + size].copy_(tensor_bytes(source)[start : start + size], non_blocking=True)
    finally:
        # Also after an error: the memory on both sides is about to be used again.
        for stream in streams.values():
            stream.record_event().synchronize()


def can_pin() -> bool:
    """Tells whether a shard has come from a device, which would write to registered memory by itself."""
    return bool(_side_streams)


def pin(data: torch.Tensor) -> bool:
    """Registers memory with CUDA; tells whether it could, and `unpin` must be called before the memory goes."""
    # Portable: known to all devices of the process, not only to the one that is current here.
    return not _call("cudaHostRegister", data.data_ptr(), data.nbytes, _PORTABLE)


def unpin(address: int) -> None:
    """Undoes `pin` of the memory that begins at the address."""
    _call("cudaHostUnregister", address)


def _call(function: str, *arguments: int) -> int:
    # On a device that is in use. A background thread has chosen none, so CUDA would set up the first one for it, with
    # hundreds of megabytes of what may be another rank's memory.
    device, *_ = _side_streams
    with _cuda.device(device):
        return int(getattr(_cuda.cudart(), function)(*arguments))


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _side_streams:
        _side_streams[device] = _cuda.Stream(device)
    return _side_streams[device]
