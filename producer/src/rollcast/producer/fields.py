"""The fields that context parallelism splits, and their plain restore, tensor by tensor."""

from collections.abc import Mapping
from typing import Any

import torch

from rollcast.producer.context_parallel import GatherTensor
from rollcast.producer.errors import RolloutDataError
from rollcast.schemas.shards import sample_count
from rollcast.schemas.sizes import counted

CONTEXT_PARALLEL_FIELDS = (
    "rollout_log_probs",
    "teacher_log_probs",
    "log_probs",
    "ref_log_probs",
    "values",
    "advantages",
    "returns",
    "kl",
    "entropy",
    "opd_reverse_kl",
)
"""Columns with one value per response token, of which a context-parallel rank holds its spans only."""


def restore_context_parallel_fields_to_cpu(
    rollout_data: Mapping[str, Any], gather_tensor: GatherTensor | None, *, keep_restored: bool
) -> dict[str, Any] | None:
    """Returns `rollout_data` on the CPU with every split field restored, or None where it is not kept.

    Every context-parallel peer calls it, for `gather_tensor` is collective: field by field in the order of
    `CONTEXT_PARALLEL_FIELDS`, sample by sample. A result is detached, checked, moved to the CPU where it is kept, and
    dropped before the next. The input stays as it was.

    Args:
        rollout_data: one shard.
        gather_tensor: `(local, total_length, response_length)` to the whole response; None where each rank holds whole
            responses, which needs no `total_lengths`.
        keep_restored: this rank wants the result.

    Raises:
        RolloutDataError: a field does not have one tensor per sample, or a result not one entry per response token.
        TypeError: an entry is no tensor.
    """
    count = sample_count(rollout_data)
    restored: dict[str, list[torch.Tensor]] = {}
    for name in CONTEXT_PARALLEL_FIELDS:
        values = rollout_data.get(name)
        if values is None:
            continue
        tensors = check_one_tensor_per_sample(name, values, count)
        totals = responses = check_lengths(rollout_data, "response_lengths", count)
        if gather_tensor is not None:
            totals = check_lengths(rollout_data, "total_lengths", count)
        kept = []
        for slot, (tensor, total, response) in enumerate(zip(tensors, totals, responses, strict=True)):
            whole = (tensor if gather_tensor is None else gather_tensor(tensor, total, response)).detach()
            if len(whole) != response:
                raise RolloutDataError(
                    f"{name!r} of sample {slot} has {counted(len(whole), 'entry', 'entries')} after the restore, for "
                    f"{counted(response, 'token')}"
                )
            if keep_restored:
                kept.append(whole.to("cpu", copy=True))
            del whole
        restored[name] = kept
    if not keep_restored:
        return None
    return {name: restored[name] if name in restored else _to_cpu(value) for name, value in rollout_data.items()}


def check_one_tensor_per_sample(name: str, values: object, count: int) -> list[torch.Tensor]:
    """Returns the column as a list of tensors.

    Raises:
        RolloutDataError: another number of entries than samples.
        TypeError: an entry is no tensor.
    """
    if not isinstance(values, (list, tuple, torch.Tensor)) or len(values) != count:
        found = len(values) if isinstance(values, (list, tuple, torch.Tensor)) else f"a {type(values).__name__}"
        raise RolloutDataError(f"{name!r} needs one tensor per sample: it has {found}, for {counted(count, 'sample')}")
    if {*map(type, values)} == {torch.Tensor}:
        return list(values)
    for slot, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name!r} of sample {slot} is a {type(value).__name__}; it needs one tensor per sample")
    return list(values)


def check_lengths(rollout_data: Mapping[str, Any], name: str, count: int) -> list[int]:
    """Returns a column of lengths as integers.

    Raises:
        RolloutDataError: it is absent or has another number of entries than samples.
    """
    values = rollout_data.get(name)
    if values is None or len(values) != count:
        found = "absent" if values is None else f"{len(values)} long"
        samples = counted(count, "sample")
        raise RolloutDataError(f"{name!r} is {found}; the restore needs one length per sample, for {samples}")
    return [int(value) for value in values]


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _to_cpu(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_to_cpu(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value
