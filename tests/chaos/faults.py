"""What is done to the processes while the records are sent: drawn before, so that a seed tells the same story again."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Final

from chaos.members import Member
from rollcast.consumer.broker import JvmBroker

# Longer than the session timeout of a member, so that its partitions go to others.
_PAUSE_S: Final = 15.0


class Kind(Enum):
    """What can go wrong."""

    KILL_DAEMON = "kill -9 of a daemon"
    KILL_BROKER = "kill -9 of the broker"
    PAUSE_DAEMON = "SIGSTOP of a daemon"
    RESTART_DAEMON = "SIGTERM of a daemon"


HOW_OFTEN: Final = {Kind.KILL_DAEMON: 4, Kind.KILL_BROKER: 2, Kind.PAUSE_DAEMON: 2, Kind.RESTART_DAEMON: 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        kind: what.
        at: the number of the burst with which it comes.
        member: index of the daemon that it hits.
        away_s: how long what was killed is away.
    """

    kind: Kind
    at: int
    member: int
    away_s: float


def drawn_faults(random: Random, *, bursts: int, members: int) -> list[Fault]:
    """Returns each kind of fault as often as it is to happen, spread over the bursts."""
    kinds = [kind for kind, count in HOW_OFTEN.items() for _ in range(count)]
    random.shuffle(kinds)
    # After the first burst the daemons have begun.
    places = sorted(random.sample(range(1, bursts), len(kinds)))
    return [
        Fault(kind=kind, at=at, member=random.randrange(members), away_s=random.uniform(0, 4))
        for kind, at in zip(kinds, places, strict=True)
    ]


class Faults:
    """Does the faults. They run beside the sending and beside each other, but for those of one process.

    Args:
        faults: what is to be done.
        broker: the broker they hit.
        members: the daemons they hit.
        report: takes a line for each.
    """

    def __init__(
        self, faults: Sequence[Fault], broker: JvmBroker, members: Sequence[Member], report: Callable[[str], None]
    ) -> None:
        self._faults, self._broker, self._members, self._report = faults, broker, members, report
        self._broker_lock = asyncio.Lock()

    def start(self, burst: int, tasks: asyncio.TaskGroup) -> None:
        """Starts what comes with this burst."""
        for fault in self._faults:
            if fault.at == burst:
                tasks.create_task(self._do(fault))

    async def _do(self, fault: Fault) -> None:
        member = self._members[fault.member]
        if fault.kind is Kind.KILL_DAEMON:
            await member.kill_and_start(fault.away_s)
        elif fault.kind is Kind.PAUSE_DAEMON:
            await member.pause(_PAUSE_S)
        elif fault.kind is Kind.RESTART_DAEMON:
            await member.restart()
        else:
            await self._kill_broker(fault.away_s)

    async def _kill_broker(self, away_s: float) -> None:
        async with self._broker_lock:
            self._report(f"the broker is killed, and away for {away_s:.1f} s")
            await asyncio.to_thread(self._broker.kill)
            await asyncio.sleep(away_s)
            await asyncio.to_thread(self._broker.start)
            self._report("the broker answers again")
