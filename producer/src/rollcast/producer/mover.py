"""Moves bytes from wherever the trainer's tensors are to the mapped tensor file."""

import ctypes
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import repeat
from operator import add, attrgetter, ge, mul
from typing import Any

import numpy as np
import torch

from rollcast.producer.plan import Copies
from rollcast.schemas.tensors import tensor_bytes

_NBYTES, _IS_CPU, _ITEM_BYTES = attrgetter("nbytes"), attrgetter("is_cpu"), attrgetter("itemsize")
_OFFSET, _ELEMENTS, _IS_CONTIGUOUS = torch.Tensor.storage_offset, torch.Tensor.numel, torch.Tensor.is_contiguous
_STORAGE, _STORED_BYTES = torch.Tensor.untyped_storage, torch.UntypedStorage.nbytes

# Its functions carry no types.
_cuda: Any = torch.cuda

_PORTABLE = 1
# Of each device that a shard has come from, in that order.
_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def can_join(sources: Sequence[torch.Tensor], dtype: torch.dtype, target: torch.Tensor) -> bool:
    """Tells whether `join` takes these tensors.

    It does not where one is on a device or has lost its bytes, and where torch would make other bytes or has no place
    for them.

    Args:
        sources: with one dimension each.
        dtype: of each.
        target: uint8, on the CPU.
    """
    # It makes 1 of every other byte than 0 in a bool.
    if dtype is torch.bool or target.storage_offset() % dtype.itemsize or not all(map(_IS_CPU, sources)):
        return False
    # A tensor whose storage was freed or cut (`resize_`) keeps its size; reading it could end the process.
    ends = map(add, map(_OFFSET, sources), map(_ELEMENTS, sources))
    if not all(map(_IS_CONTIGUOUS, sources)):
        ends = map(_end, sources)
    return all(map(ge, map(_STORED_BYTES, map(_STORAGE, sources)), map(mul, ends, repeat(dtype.itemsize))))


def _end(source: torch.Tensor) -> int:
    """Returns the element of its storage at which a tensor with one dimension ends."""
    return int(source.storage_offset()) + (len(source) - 1) * source.stride(0) + 1 if len(source) else 0


def join(sources: tuple[torch.Tensor, ...], dtype: torch.dtype, target: torch.Tensor) -> None:
    """Copies whole tensors, of which `can_join` was true, to the target, side by side, in one call.

    Args:
        sources: with one dimension each.
        dtype: of each.
        target: uint8, on the CPU, as many bytes.

    Raises:
        ValueError: the sources are not as many bytes.
    """
    out = target.view(dtype)
    torch.cat(sources, out=out)
    if out.nbytes != target.nbytes:
        raise ValueError(f"tensors of {out.nbytes} bytes do not hold the {target.nbytes} that were planned")


def move(sources: Sequence[torch.Tensor], copies: Copies, data: torch.Tensor) -> None:
    """Copies tensors to their places; returns when all bytes are there.

    From a CUDA device the copies go through a stream of their own, after what the device's current stream has to do,
    and are waited for once, at the end; into pinned memory (`pin`) the device writes by itself.

    Args:
        sources: anywhere.
        copies: of them.
        data: the target, uint8, on the CPU.

    Raises:
        ValueError: a tensor has not the planned size, or its place is not within the target.
        RuntimeError: one that is not contiguous ends beyond its storage.
    """
    # A tensor whose storage was freed or cut (`resize_`) keeps its size; reading it could end the process.
    stored, sizes, offsets, item_bytes = (
        np.array([*numbers], np.int64)
        for numbers in (
            map(_STORED_BYTES, map(_STORAGE, sources)),
            map(_NBYTES, sources),
            map(_OFFSET, sources),
            map(_ITEM_BYTES, sources),
        )
    )
    contiguous = np.array([*map(_IS_CONTIGUOUS, sources)], np.bool_)
    # Of what is not contiguous `tensor_bytes` looks where it ends.
    ends = np.where(contiguous, offsets * item_bytes + sizes, sizes > 0)
    held = np.where(ends <= stored, sizes, 0)[copies.tensors]
    is_beyond = (copies.targets < 0) | (copies.targets + copies.sizes > data.nbytes)
    if (held != copies.sizes).any() or is_beyond.any():
        raise ValueError(f"a tensor does not hold what was planned, or its place is beyond {data.nbytes} bytes")
    # Not with torch, whose two views and one copy for each tensor take several times as long as the bytes.
    addresses = np.array([*map(torch.Tensor.data_ptr, sources)], np.int64)
    addresses *= contiguous & np.array([*map(_IS_CPU, sources)], np.bool_)
    addresses = addresses[copies.tensors]
    plain = addresses != 0
    targets = data.data_ptr() + copies.targets
    deque(map(ctypes.memmove, *(array[plain].tolist() for array in (targets, addresses, copies.sizes))), maxlen=0)
    if not plain.all():
        _copy_others(sources, Copies(*(array[~plain] for array in copies)), data)


def _copy_others(sources: Sequence[torch.Tensor], copies: Copies, data: torch.Tensor) -> None:
    streams: dict[torch.device, torch.cuda.Stream] = {}
    try:
        with ExitStack() as current:
            for tensor, target, size in copies.each():
                source = sources[tensor]
                if source.is_cuda and source.device not in streams:
                    stream = streams[source.device] = _side_stream(source.device)
                    stream.wait_stream(torch.cuda.current_stream(source.device))
                    current.enter_context(torch.cuda.stream(stream))
                data[target : target + size].copy_(tensor_bytes(source), non_blocking=True)
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
