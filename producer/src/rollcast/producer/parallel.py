"""Where this process stands among the parallel training ranks."""

import re
from dataclasses import dataclass

import torch.distributed as dist

from rollcast.producer.errors import ProducerError

_OLDEST_VERSION = (0, 13)
_OLDEST = "0.13 or newer"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """Coordinates of one rank.

    Attributes:
        rank: global rank.
        is_last_stage: it belongs to the last pipeline stage, virtual stages left aside.
        tensor_parallel_rank: its place in the tensor-parallel group.
        tensor_parallel_size: size of that group.
        pipeline_parallel_size: number of pipeline stages.
        context_parallel_rank: its place in the context-parallel group.
        context_parallel_size: size of that group.
        data_parallel_rank: its shard, context parallelism left aside.
        data_parallel_size: number of shards.
    """

    rank: int = 0
    is_last_stage: bool = True
    tensor_parallel_rank: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_rank: int = 0
    context_parallel_size: int = 1
    data_parallel_rank: int = 0
    data_parallel_size: int = 1

    @property
    def takes_part(self) -> bool:
        """It holds a piece of a shard's records: last pipeline stage, first tensor-parallel rank."""
        return self.is_last_stage and self.tensor_parallel_rank == 0

    @property
    def is_writer(self) -> bool:
        """It commits its shard: the first of the context-parallel peers that take part."""
        return self.takes_part and self.context_parallel_rank == 0


def current_layout() -> ParallelLayout:
    """Returns this process's coordinates in megatron-core's groups; a process without torch.distributed is alone.

    Raises:
        ProducerError: torch.distributed runs, but megatron-core is missing or its groups are not set up.
    """
    if not dist.is_available() or not dist.is_initialized():
        return ParallelLayout()
    try:
        import megatron.core
        from megatron.core import parallel_state
    except ImportError as exc:
        raise ProducerError(
            f"torch.distributed is initialised but megatron-core cannot be imported ({exc}): "
            f"install megatron-core {_OLDEST}, rollcast finds the writer ranks through its parallel_state"
        ) from exc
    version = str(getattr(megatron.core, "__version__", "0"))
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < _OLDEST_VERSION:
        raise ProducerError(f"megatron-core is {version}; install {_OLDEST}")
    if not parallel_state.model_parallel_is_initialized():
        raise ProducerError(
            "megatron-core's parallel groups are not set up: call parallel_state.initialize_model_parallel() "
            "before creating a Publisher"
        )
    return ParallelLayout(
        rank=dist.get_rank(),
        is_last_stage=parallel_state.is_pipeline_last_stage(ignore_virtual=True),
        tensor_parallel_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        context_parallel_rank=parallel_state.get_context_parallel_rank(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
    )
