"""What one rank of the demo does; `launch` starts it."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from rollcast.producer import Publisher, PublisherConfig, save_debug_train_data
from rollcast_demo.config import Event, TrainerConfig
from rollcast_demo.layout import WORLD_SIZE, Layout
from rollcast_demo.learner import Learner
from rollcast_demo.records import Place, Records, build_records, shard_positions
from rollcast_demo.rollout import RolloutEngine, Sample

_Result = TypeVar("_Result")
_COLLECTIVE_TIMEOUT = timedelta(seconds=180)


@dataclass(slots=True)
class _InlineArguments:
    """The one of a trainer's arguments that the inline dump reads."""

    save_debug_train_data: str | None


class _Run:
    """One training run of one rank in one parallel layout.

    Args:
        config: What to train and where to write.
        layout: The parallel sizes; megatron-core's groups are already up.
        learner: The weights, equal on every rank.
    """

    def __init__(self, config: TrainerConfig, layout: Layout, learner: Learner) -> None:
        self._learner = learner
        self._engine = RolloutEngine(seed=config.seed)
        self._run_id = config.run_id(layout)
        self._inline = _InlineArguments(save_debug_train_data=config.inline_template.replace("{run_id}", self._run_id))
        self._publisher = Publisher(
            PublisherConfig(
                run_id=self._run_id,
                spool_dir=config.spool_dir,
                bootstrap_servers=config.bootstrap_servers,
                topic_prefix=config.topic_prefix,
            )
        )
        self._sample_count = 0
        self._rollout_count = 0

    def rollout(self, rollout_id: int) -> Event:
        """Sample, train, dump inline and publish one rollout. Collective."""
        samples = self._sample_everywhere()
        place = Place(
            data_rank=parallel_state.get_data_parallel_rank(),
            data_size=parallel_state.get_data_parallel_world_size(),
            context_rank=parallel_state.get_context_parallel_rank(),
            context_size=parallel_state.get_context_parallel_world_size(),
            first_sample=self._sample_count,
            first_rollout=self._rollout_count,
        )
        positions = shard_positions(len(samples), data_rank=place.data_rank, data_size=place.data_size)
        shard = [samples[position] for position in positions]
        records = build_records(samples, self._learner.score(shard), place)
        self._train(shard, records)
        _, inline_s = _timed(
            lambda: save_debug_train_data(self._inline, rollout_id=rollout_id, rollout_data=records.rollout_data)
        )
        result, publish_s = _timed(lambda: self._publisher.publish(rollout_id, records.rollout_data))
        rewards = {sample.rollout: sample.reward for sample in samples}
        self._sample_count += len(samples)
        self._rollout_count += len(rewards)
        return Event(
            kind="rollout",
            rank=dist.get_rank(),
            run_id=self._run_id,
            rollout_id=rollout_id,
            problem=result.reason,
            numbers={
                "reward": sum(rewards.values()) / len(rewards),
                "samples": len(samples),
                "truncated": sum(sample.truncated for sample in samples),
                "masked": sum(sample.removed for sample in samples),
                "shared": len(samples) - len(rewards),
                "empty_spans": sum(not term.spans for term in records.loss_terms),
                "inline_s": inline_s,
                "publish_s": publish_s,
            },
        )

    def close(self, timeout_s: float) -> Event:
        """Close the publisher; the event says whether everything was delivered. Collective."""
        start = time.perf_counter()
        delivered = self._publisher.close(timeout_s=timeout_s)
        return Event(
            kind="closed",
            rank=dist.get_rank(),
            run_id=self._run_id,
            problem=None if delivered else f"not everything was delivered within {timeout_s:.0f} s",
            numbers={"close_s": time.perf_counter() - start},
        )

    def _sample_everywhere(self) -> list[Sample]:
        """Return the samples that the engine on global rank 0 generated, on every rank."""
        holder = [self._engine.generate(self._learner.model) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(holder, src=0)
        samples = holder[0]
        assert samples is not None
        return samples

    def _train(self, shard: list[Sample], records: Records) -> None:
        for micro_batch in records.micro_batches:
            self._learner.accumulate(
                [shard[slot] for slot in micro_batch], [records.loss_terms[slot] for slot in micro_batch]
            )
        group: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._learner.step(group)


def join_and_train(config: TrainerConfig, *, rank: int, meeting_point: Path, report: Callable[[Event], None]) -> None:
    """Join the other ranks and train.

    Args:
        config: What to train and where to write.
        rank: Global rank.
        meeting_point: File through which the ranks find each other; a new one each time.
        report: Takes the events of this rank.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = _loopback_interface()
    dist.init_process_group(
        "gloo",
        init_method=meeting_point.absolute().as_uri(),
        rank=rank,
        world_size=WORLD_SIZE,
        # Ranks that have nothing to deliver wait at a barrier for those that have.
        timeout=_COLLECTIVE_TIMEOUT + timedelta(seconds=config.close_timeout_s),
    )
    _train(config, report)
    dist.destroy_process_group()


def _train(config: TrainerConfig, report: Callable[[Event], None]) -> None:
    """Run every layout in turn on this rank; the default process group is up. Collective."""
    learner = Learner(seed=config.seed, learning_rate=config.learning_rate)
    if dist.get_rank() == 0:
        learner.warm_up(config.warm_up_steps)
    learner.share_weights()
    for layout in config.layouts:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            context_parallel_size=layout.context,
        )
        learner.restore_first_weights()
        run = _Run(config, layout, learner)
        report(Event(kind="ready", rank=dist.get_rank(), run_id=config.run_id(layout)))
        for rollout_id in range(config.rollouts):
            report(run.rollout(rollout_id))
        report(run.close(config.close_timeout_s))
        dist.barrier()
        parallel_state.destroy_model_parallel()


def _timed(action: Callable[[], _Result]) -> tuple[_Result, float]:
    """Return the action's result and the seconds it took on this rank, started on all ranks together."""
    dist.barrier()
    start = time.perf_counter()
    result = action()
    return result, time.perf_counter() - start


def _loopback_interface() -> str:
    """Return the name of the loopback interface, so that gloo neither resolves the host name nor meets the network."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
