"""The one small collective of a publish: do all ranks have the same plan, and does every spool take it?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from rollcast.producer.errors import ControlError
from rollcast.producer.parallel import ParallelLayout
from rollcast.producer.result import DropReason


class Vote(IntEnum):
    """What a rank can say of a rollout before anything is copied."""

    READY = 0
    BAD_DATA = 1
    SPOOL_FULL = 2
    FAILED = 3
    REPEATED = 4
    OFF = 5
    UNEXPECTED = 6


_REASONS = {
    Vote.BAD_DATA: (DropReason.BAD_DATA, "rollout_data cannot be published"),
    Vote.SPOOL_FULL: (DropReason.SPOOL_FULL, "spool full"),
    Vote.FAILED: (DropReason.NOT_CREATED, "the bundle could not be created"),
    Vote.REPEATED: (DropReason.REPEATED, "the rollout id is taken"),
    Vote.OFF: (DropReason.OFF, "publishing is switched off there"),
    Vote.UNEXPECTED: (DropReason.UNEXPECTED, "something unexpected happened"),
}
_VOTES = {kind: vote for vote, (kind, _) in _REASONS.items()}


def vote_for(reason: DropReason) -> Vote:
    """Returns how a rank votes that has this reason to drop a rollout."""
    return _VOTES[reason]


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
        """Returns every member's message; all have the same length. Collective over the members.

        Raises:
            ControlError: a member is gone or did not come in time; the group is of no use any more.
        """
        return self.start_exchange(message)()

    def start_exchange(self, message: Sequence[int]) -> Callable[[], list[list[int]]]:
        """Begins an exchange; what it returns waits for the messages and must be called.

        Raises:
            ControlError: as `exchange`, now or then.
        """
        if self.group is None:
            return lambda: [list(message)]
        own = torch.tensor(message, dtype=torch.int64)
        received = [torch.empty_like(own) for _ in self.members]
        try:
            work: Any = dist.all_gather(received, own, group=self.group, async_op=True)
        except RuntimeError as exc:
            raise _absent(exc) from exc

        def messages() -> list[list[int]]:
            try:
                work.wait()
            except RuntimeError as exc:
                raise _absent(exc) from exc
            return [tensor.tolist() for tensor in received]

        return messages

    def sender_to(self, data_parallel_rank: int, context_parallel_rank: int) -> Callable[[torch.Tensor], None]:
        """Returns a function that sends a CPU tensor to the member at these coordinates."""
        rank = self._rank_of(data_parallel_rank, context_parallel_rank)

        def send(buffer: torch.Tensor) -> None:
            try:
                dist.send(buffer, dst=rank, group=self.group)
            except RuntimeError as exc:
                raise ControlError(f"rank {rank} does not take this rank's records: {exc}") from exc

        return send

    def receiver_from(self, data_parallel_rank: int, context_parallel_rank: int) -> Callable[[torch.Tensor], None]:
        """Returns a function that fills a CPU tensor with what the member at these coordinates sends."""
        rank = self._rank_of(data_parallel_rank, context_parallel_rank)

        def receive(buffer: torch.Tensor) -> None:
            try:
                dist.recv(buffer, src=rank, group=self.group)
            except RuntimeError as exc:
                raise ControlError(f"rank {rank} does not send its records: {exc}") from exc

        return receive

    def _rank_of(self, data_parallel_rank: int, context_parallel_rank: int) -> int:
        return next(
            member.rank
            for member in self.members
            if (member.data_parallel_rank, member.context_parallel_rank) == (data_parallel_rank, context_parallel_rank)
        )


def _absent(error: RuntimeError) -> ControlError:
    return ControlError(f"a rank is gone or did not publish in time: {error}")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why no rank publishes the rollout.

    Attributes:
        kind: the reason in one word.
        reason: one sentence, the same on every rank.
        announced: consumers are told that the rollout was dropped; not where its id is taken by a good one.
        final: no rank publishes anything from now on.
        rank: the one that refuses; None where none alone does.
    """

    kind: DropReason
    reason: str
    announced: bool
    final: bool = False
    rank: int | None = None

    def told_on(self, rank: int, error: Exception | None) -> str:
        """Returns the reason as a rank tells it, with what that rank itself has against the rollout."""
        if error is None:
            return self.reason
        return f"{self.reason}: {error}" if rank == self.rank else f"{self.reason}; here, on rank {rank}: {error}"


def decide(members: Sequence[Member], messages: Sequence[Sequence[int]]) -> Refusal | None:
    """Returns the common verdict on `(vote, plan digest, rollout id)` of every member, None for go.

    A pure function of what all ranks have received alike, so all shards publish, or none does.
    """
    anybody_off = any(vote == Vote.OFF for vote, _, _ in messages)
    if not anybody_off and len({rollout_id for _, _, rollout_id in messages if rollout_id >= 0}) > 1:
        ranks = ", ".join(f"rank {m.rank}: {message[2]}" for m, message in zip(members, messages, strict=True))
        return Refusal(DropReason.MISMATCH, f"the ranks publish different rollouts ({ranks})", announced=False)
    # Off before anything else: all ranks must come to know it in the same exchange.
    votes = sorted(zip(members, messages, strict=True), key=lambda pair: pair[1][0] != Vote.OFF)
    for member, (vote, _, _) in votes:
        if vote != Vote.READY:
            kind, words = _REASONS[Vote(vote)]
            reason = f"rank {member.rank} (shard {member.data_parallel_rank}): {words}"
            announced = vote not in (Vote.REPEATED, Vote.OFF)
            return Refusal(kind, reason, announced=announced, final=vote == Vote.OFF, rank=member.rank)
    digests: dict[int, int] = {}
    for member, (_, digest, _) in zip(members, messages, strict=True):
        if digests.setdefault(member.data_parallel_rank, digest) != digest:
            reason = (
                f"the context-parallel peers of shard {member.data_parallel_rank} hold different fields, "
                "dtypes, lengths or sample counts"
            )
            return Refusal(DropReason.MISMATCH, reason, announced=True)
    return None
