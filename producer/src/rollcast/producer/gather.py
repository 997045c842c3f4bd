"""Context-parallel peers that cannot map one file send their pieces to the writer, whatever fails on either side."""

from collections.abc import Callable

import torch

from rollcast.producer.control import Control
from rollcast.producer.copy import receive_from, send_own
from rollcast.producer.errors import ControlError, ProducerError
from rollcast.producer.parallel import ParallelLayout
from rollcast.producer.plan import ShardPlan


def send_pieces(plan: ShardPlan, layout: ParallelLayout, control: Control, bucket_bytes: int) -> int:
    """Sends what this rank holds to the writer of its shard; returns the number of bytes.

    Raises:
        ControlError: the writer is gone.
        Exception: whatever the tensors provoked, after everything was sent.
    """
    send = control.sender_to(layout.data_parallel_rank, 0)
    return send_own(plan, layout.context_parallel_rank, send, bucket_bytes)


def receive_pieces(
    plan: ShardPlan, layout: ParallelLayout, control: Control, data: torch.Tensor, bucket_bytes: int
) -> None:
    """Puts what the peers of this writer send in its place.

    Every message is taken before anything is raised: nobody must be left sending.

    Args:
        plan: the shard.
        layout: this rank's coordinates.
        control: reaches the peers.
        data: the bytes of the tensor file.
        bucket_bytes: size of a message.

    Raises:
        ControlError: a peer is gone.
        ProducerError: a peer could not read its pieces, or this rank could not place them.
    """
    failures = []
    for peer in range(1, layout.context_parallel_size):
        receive = control.receiver_from(layout.data_parallel_rank, peer)
        try:
            good = _receive_all(plan, peer, receive, data, bucket_bytes)
        except ControlError:
            raise
        except Exception as exc:  # noqa: BLE001  # whatever it is, the next peer is sending already
            failures.append(f"what context-parallel peer {peer} sent could not be placed: {exc!r}")
        else:
            if not good:
                failures.append(f"context-parallel peer {peer} could not read its records")
    if failures:
        raise ProducerError("; ".join(failures))


def _receive_all(
    plan: ShardPlan, peer: int, receive: Callable[[torch.Tensor], None], data: torch.Tensor, bucket_bytes: int
) -> bool:
    """Receives what a peer sends; also where that fails half-way, and then raises."""
    taken = 0

    def take(buffer: torch.Tensor) -> None:
        nonlocal taken
        receive(buffer)
        taken += 1

    try:
        return receive_from(plan, peer, take, data, bucket_bytes)
    except ControlError:
        raise
    except Exception:
        # Once more from the start, to a place that has no memory, without the messages that came already.
        nowhere = torch.empty(plan.data_bytes, dtype=torch.uint8, device="meta")
        skipped = 0

        def take_rest(buffer: torch.Tensor) -> None:
            nonlocal skipped
            if skipped < taken:
                skipped += 1
            else:
                receive(buffer)

        receive_from(plan, peer, take_rest, nowhere, bucket_bytes)
        raise
