"""The one small collective of a publish: do all ranks have the same plan, and does every spool take it?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from rollcast.producer.parallel import ParallelLayout


class Vote(IntEnum):
    """What a rank can say of a rollout before anything is copied."""

    READY = 0
    BAD_DATA = 1
    SPOOL_FULL = 2
    FAILED = 3
    REPEATED = 4


_REASONS = {
    Vote.BAD_DATA: "rollout_data cannot be published",
    Vote.SPOOL_FULL: "spool full",
    Vote.FAILED: "the bundle could not be created",
    Vote.REPEATED: "this rollout was published before in this attempt",
}


@dataclass(frozen=True, slots=True)
class Member:
    """A rank that takes part.

    Attributes:
        rank: global rank.
        data_parallel_rank: its shard.
        context_parallel_rank: its place among the peers of that shard.
    """

    rank: int
    data_parallel_rank: int
    context_parallel_rank: int


class Control:
    """The group of all ranks that take part, on gloo whatever the trainer's backend is.

    Making one is collective over the whole world; afterwards only the members meet.

    Attributes:
        members: in the order of the messages that `exchange` returns.
        group: the process group; None where this process is alone or not a member.
    """

    def __init__(self, layout: ParallelLayout, timeout_s: float) -> None:
        own = Member(layout.rank, layout.data_parallel_rank, layout.context_parallel_rank)
        self.members = [own]
        self.group: dist.ProcessGroup | None = None
        if not dist.is_initialized():
            return
        everybody: list[Member | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, own if layout.takes_part else None)
        self.members = [member for member in everybody if member is not None]
        ranks = [member.rank for member in self.members]
        group: Any = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend="gloo")
        if layout.takes_part and len(ranks) > 1:
            self.group = group

    def exchange(self, message: Sequence[int]) -> list[list[int]]:
        """Returns every member's message; all have the same length. Collective over the members."""
        if self.group is None:
            return [list(message)]
        own = torch.tensor(message, dtype=torch.int64)
        received = [torch.empty_like(own) for _ in self.members]
        dist.all_gather(received, own, group=self.group)
        return [tensor.tolist() for tensor in received]

    def sender_to(self, data_parallel_rank: int, context_parallel_rank: int) -> Callable[[torch.Tensor], None]:
        """Returns a function that sends a CPU tensor to the member at these coordinates."""
        rank = self._rank_of(data_parallel_rank, context_parallel_rank)
        return lambda buffer: dist.send(buffer, dst=rank, group=self.group)

    def receiver_from(self, data_parallel_rank: int, context_parallel_rank: int) -> Callable[[torch.Tensor], None]:
        """Returns a function that fills a CPU tensor with what the member at these coordinates sends."""
        rank = self._rank_of(data_parallel_rank, context_parallel_rank)

        def receive(buffer: torch.Tensor) -> None:
            dist.recv(buffer, src=rank, group=self.group)

        return receive

    def _rank_of(self, data_parallel_rank: int, context_parallel_rank: int) -> int:
        return next(
            member.rank
            for member in self.members
            if (member.data_parallel_rank, member.context_parallel_rank) == (data_parallel_rank, context_parallel_rank)
        )


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why no rank publishes the rollout.

    Attributes:
        reason: one sentence, the same on every rank.
        announced: consumers are told that the rollout was dropped; not where its id is taken by a good one.
    """

    reason: str
    announced: bool


def decide(members: Sequence[Member], messages: Sequence[Sequence[int]]) -> Refusal | None:
    """Returns the common verdict on `(vote, plan digest, rollout id)` of every member, None for go.

    A pure function of what all ranks have received alike, so all shards publish, or none does.
    """
    if len({rollout_id for _, _, rollout_id in messages}) > 1:
        ranks = ", ".join(f"rank {m.rank}: {message[2]}" for m, message in zip(members, messages, strict=True))
        return Refusal(f"the ranks publish different rollouts ({ranks})", announced=False)
    for member, (vote, _, _) in zip(members, messages, strict=True):
        if vote != Vote.READY:
            reason = f"rank {member.rank} (shard {member.data_parallel_rank}): {_REASONS[Vote(vote)]}"
            return Refusal(reason, announced=vote != Vote.REPEATED)
    digests: dict[int, int] = {}
    for member, (_, digest, _) in zip(members, messages, strict=True):
        if digests.setdefault(member.data_parallel_rank, digest) != digest:
            reason = (
                f"the context-parallel peers of shard {member.data_parallel_rank} hold different fields, "
                "dtypes, lengths or sample counts"
            )
            return Refusal(reason, announced=True)
    return None
