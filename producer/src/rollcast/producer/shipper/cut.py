"""A bundle to the parts that Kafka gets, slot by slot, in threads beside the event loop."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator
from concurrent.futures import Executor
from dataclasses import dataclass

from rollcast.producer.errors import SpoolError
from rollcast.producer.spool.pages import require_readable, require_whole
from rollcast.producer.spool.read import Bundle, check_tensors
from rollcast.schemas.errors import ContractError
from rollcast.schemas.events import SamplePart, TensorSlice
from rollcast.schemas.framing import encode
from rollcast.schemas.parts import content_digest, pack_large_values, split

# What a slot takes in memory beyond its tensors; bounds how many small ones are cut ahead.
_SLOT_OVERHEAD_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class SlotFrames:
    """One slot, ready to send.

    Attributes:
        digest: of its content.
        frames: its parts, encoded.
    """

    digest: bytes
    frames: list[bytes]


async def cut(
    bundle: Bundle, max_part_bytes: int, threads: Executor, max_ahead_bytes: int
) -> AsyncGenerator[SlotFrames, None]:
    """Yields each slot of a bundle in order, while the threads cut those that come next.

    The tensors are checked meanwhile, in another thread: it ends without an error only if they are undamaged. Close the
    generator when it is not read to its end.

    Args:
        bundle: what to cut.
        max_part_bytes: the largest part.
        threads: that do the work.
        max_ahead_bytes: raw bytes of the slots that are cut and not yet asked for; one slot may be larger.

    Raises:
        ContractError: a slot that no part can hold.
        SpoolError: tensors that cannot be read.
        UnusableBundleError: they are damaged; slots may have been yielded before.
        OSError: the machine is in trouble; the bundle may be good.
    """
    loop = asyncio.get_running_loop()
    given_up = threading.Event()
    check = loop.run_in_executor(None, check_tensors, bundle, given_up)
    ahead: deque[tuple[asyncio.Future[SlotFrames], int]] = deque()
    ahead_bytes = 0
    try:
        for slot in bundle.slots:
            size = _raw_bytes(slot) + _SLOT_OVERHEAD_BYTES
            while ahead and ahead_bytes + size > max_ahead_bytes:
                future, done_bytes = ahead.popleft()
                yield await future
                ahead_bytes -= done_bytes
            if check.done():
                check.result()
            else:
                # Not by the threads that cut: a disk that does not answer would keep them from other spools.
                await loop.run_in_executor(None, _bring_in, slot)
            ahead.append((loop.run_in_executor(threads, cut_slot, slot, max_part_bytes), size))
            ahead_bytes += size
        while ahead:
            yield await ahead.popleft()[0]
        await asyncio.shield(check)
    finally:
        for future, _ in ahead:
            future.cancel()
        # It must not go on when the bundle is nobody's any more, and its file may be filled again.
        given_up.set()
        await asyncio.wait({check})
        check.exception()


def cut_slot(slot: SamplePart, max_part_bytes: int) -> SlotFrames:
    """Returns the parts and digest of a slot, whose tensors have been brought into memory.

    Raises:
        ContractError: no part can hold it, or what it says of itself makes no sense.
        SpoolError: its tensors cannot be read.
    """
    try:
        for column in slot.columns:
            if isinstance(column.value, TensorSlice):
                require_whole(column.value.data)
        columns = pack_large_values(slot.columns)
        frames = [encode(part) for part in split(slot, columns, max_part_bytes)]
        return SlotFrames(content_digest(columns), frames)
    except (ContractError, SpoolError, OSError, MemoryError):
        raise
    except Exception as exc:  # a damaged bundle makes any step fail in any way
        raise ContractError(f"slot {slot.slot} cannot be cut: {exc!r}") from exc


def _bring_in(slot: SamplePart) -> None:
    for column in slot.columns:
        if isinstance(column.value, TensorSlice):
            require_readable(column.value.data)


def _raw_bytes(slot: SamplePart) -> int:
    return sum(column.value.total_bytes for column in slot.columns if isinstance(column.value, TensorSlice))
