"""The inline way: one rank gathers every shard and writes the dump while all ranks wait."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rollcast.producer.context_parallel import GatherTensor, all_gather_with_cp
from rollcast.producer.errors import ProducerError
from rollcast.producer.fields import restore_context_parallel_fields_to_cpu
from rollcast.producer.parallel import ParallelLayout, current_layout
from rollcast.schemas.payload import build_dump_payload


def save_debug_train_data(
    args: Any,
    *,
    rollout_id: int,
    rollout_data: Mapping[str, Any],
    gather_tensor: GatherTensor | None = None,
) -> None:
    """Writes one v2 dump with the samples of all shards; collective, every rank calls it and waits.

    Args:
        args: the trainer's arguments; `args.save_debug_train_data` is a path template with `{rollout_id}` and, if
            wanted, `{rank}`; None: no dump.
        rollout_id: number of the rollout.
        rollout_data: what this rank holds of its shard.
        gather_tensor: puts one split tensor together; default: `all_gather_with_cp` where context parallelism splits.

    Raises:
        ProducerError: the template has no `{rollout_id}`, or the file cannot be written.
        RolloutDataError: `rollout_data` is misaligned.
    """
    if args.save_debug_train_data is None:
        return
    if "{rollout_id}" not in args.save_debug_train_data:
        raise ProducerError(
            f"save_debug_train_data is {args.save_debug_train_data!r}: without {{rollout_id}} each rollout would "
            "overwrite the one before; add it"
        )
    layout = current_layout()
    if not layout.takes_part:
        return
    if gather_tensor is None and layout.context_parallel_size > 1:
        gather_tensor = all_gather_with_cp
    restored = restore_context_parallel_fields_to_cpu(rollout_data, gather_tensor, keep_restored=layout.is_writer)
    if restored is None:
        return
    own = {"rank": layout.rank, "data_parallel_rank": layout.data_parallel_rank, "rollout_data": restored}
    shards = _gather_shards(own, layout)
    if shards is not None:
        payload = build_dump_payload(shards, rollout_id=rollout_id, writer_rank=layout.rank)
        path = Path(args.save_debug_train_data.format(rollout_id=rollout_id, rank=layout.rank))
        _save(payload, path)


def _gather_shards(own: dict[str, Any], layout: ParallelLayout) -> list[dict[str, Any]] | None:
    """Returns all shards in data-parallel order on the first one's writer, None on the others."""
    if layout.data_parallel_size == 1:
        return [own]
    from megatron.core import parallel_state

    group: Any = parallel_state.get_data_parallel_group_gloo()
    ranks = dist.get_process_group_ranks(group)
    collects = layout.rank == ranks[0]
    shards: list[Any] | None = [None] * len(ranks) if collects else None
    dist.gather_object(own, shards, dst=ranks[0], group=group)
    return shards


def _save(payload: dict[str, Any], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as file:
                torch.save(payload, file)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink()
            raise
    except OSError as exc:
        raise ProducerError(f"dump {path} cannot be written: {exc.strerror}; check the folder and its space") from exc
