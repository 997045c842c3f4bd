"""How long Kafka has been silent, which is not how long nothing came."""

_LONGEST_STEP_S = 2.0


class ReadingClock:
    """Runs while everything is read that Kafka has, and stands still while Kafka is away or reading waits or lags.

    What a rollout lacks may be waiting in Kafka; only by this clock does a silence mean that nothing came.

    Attributes:
        now: seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._read_up_to: float | None = None

    def advance(self, read_up_to: float) -> None:
        """Notes that everything is read that Kafka had at this loop time; a long pause counts as a short one."""
        if self._read_up_to is not None:
            self.now += min(max(0.0, read_up_to - self._read_up_to), _LONGEST_STEP_S)
        self._read_up_to = read_up_to
