"""Moves bytes from wherever the trainer's tensors are to the mapped tensor file."""

import ctypes
from collections.abc import Sequence
from functools import cache
from types import TracebackType
from typing import Any, Self

import torch

from rollcast.producer.plan import Segment
from rollcast.schemas.tensors import tensor_bytes

# Of torch, a view of the target, one of the source and the copy cost several times as much as the bytes they move.
_memmove = ctypes.memmove
# Its functions carry no types.
_cuda: Any = torch.cuda


class Mover:
    """Copies pieces of tensors; as a context manager, it ends when all bytes are there.

    From a CUDA device the copies go through a stream of their own, after what the device's current stream has to do,
    and are waited for once, at the end; into pinned memory (`pin`) the device writes by itself.

    Args:
        data: the target, uint8, on the CPU.
    """

    def __init__(self, data: torch.Tensor) -> None:
        self._data, self._address = data, data.data_ptr()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def __enter__(self) -> Self:
        """Begins."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for the devices, also after an error: the memory on both sides is about to be used again."""
        for stream in self._streams.values():
            stream.record_event().synchronize()

    def move(self, source: torch.Tensor, offset: int, segments: Sequence[Segment]) -> int:
        """Copies what a rank holds of a tensor that begins at `offset` of the target; returns how many bytes that is.

        Raises:
            ValueError: a segment is not within source and target.
        """
        target, start, size = segments[-1]
        held = start + size
        if held > source.nbytes or offset + target + size > self._data.nbytes:
            raise ValueError(f"{held} of {source.nbytes} bytes do not fit at {offset} of {self._data.nbytes}")
        if source.is_cpu and source.is_contiguous():
            to, from_ = self._address + offset, source.data_ptr()
            for target, start, size in segments:
                _memmove(to + target, from_ + start, size)
        elif source.is_cuda:
            with torch.cuda.stream(self._stream_of(source.device)):
                self._copy(source, offset, segments)
        else:
            self._copy(source, offset, segments)
        return held

    def _copy(self, source: torch.Tensor, offset: int, segments: Sequence[Segment]) -> None:
        own, whole = tensor_bytes(source), self._data[offset:]
        for target, start, size in segments:
            whole[target : target + size].copy_(own[start : start + size], non_blocking=True)

    def _stream_of(self, device: torch.device) -> torch.cuda.Stream:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = _side_stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
        return stream


def pin(data: torch.Tensor) -> bool:
    """Registers memory with CUDA where this process uses it; tells whether `unpin` must be called before it goes."""
    return _cuda.is_initialized() and not int(_cuda.cudart().cudaHostRegister(data.data_ptr(), data.nbytes, 0))


def unpin(data: torch.Tensor) -> None:
    """Undoes `pin`."""
    _cuda.cudart().cudaHostUnregister(data.data_ptr())


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = _cuda.Stream(device)
    return stream
