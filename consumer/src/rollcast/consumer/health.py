"""What the daemon says of itself: whether it lives, and whether it does its work."""

from rollcast.consumer.member import Member
from rollcast.consumer.retry import Retry
from rollcast.consumer.waiting import Waiting
from rollcast.consumer.watchdog import Watchdog

_MOST_SHOWN = 10


class Health:
    """Answers from the daemon's own state; an empty answer means that all is well.

    Attributes:
        member: the present membership of the group; None before the first.

    Args:
        retry: knows what fails at present.
        waiting: knows which dumps cannot be written.
        watchdog: knows whether records come.
    """

    def __init__(self, retry: Retry, waiting: Waiting, watchdog: Watchdog) -> None:
        self._retry, self._waiting, self._watchdog = retry, waiting, watchdog
        self.member: Member | None = None

    def live_problems(self) -> list[str]:
        """Returns why a restart might help: records are there and do not come, not even by a new client."""
        stalled_s = self._watchdog.stalled_s
        return [] if stalled_s is None else [f"no record came for {stalled_s:.0f} s, with {self._watchdog.lag} to read"]

    def ready_problems(self) -> list[str]:
        """Returns why no dump, or not every dump, is to be expected of it now."""
        problems = self.live_problems()
        if self._retry.stopping:
            problems.append("it stops")
        elif self.member is None or not self.member.placed:
            problems.append("the group has not given it partitions yet")
        elif self._watchdog.lag is None:
            problems.append(f"Kafka has not said for {self._watchdog.silent_s:.0f} s how much there is to read")
        failing = [*self._retry.failing.items(), *self._waiting.failing.items()]
        problems += [f"it could not {what}: {problem}" for what, problem in failing[:_MOST_SHOWN]]
        if len(failing) > _MOST_SHOWN:
            problems.append(f"and {len(failing) - _MOST_SHOWN} more")
        return problems
