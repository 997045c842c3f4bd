"""Errors of the consumer."""

from typing import ClassVar


class ConsumerError(Exception):
    """Root of the errors of `rollcast.consumer`."""

    retriable: ClassVar[bool] = False


class ConsumeConfigError(ConsumerError, ValueError):
    """A setting that cannot work; the message names the setting and the remedy."""


class TemplateError(ConsumeConfigError):
    """A dump path template under which two dumps could meet, or that names something unknown."""


class BrokerUnreachableError(ConsumerError):
    """No Kafka broker answered within the connect timeout.

    Attributes:
        bootstrap_servers: the addresses tried.
    """

    def __init__(self, bootstrap_servers: str, timeout_s: float, problem: object) -> None:
        self.bootstrap_servers = bootstrap_servers
        super().__init__(
            f"no Kafka broker answers at {bootstrap_servers} (tried for {timeout_s:g} s: {problem}); "
            "start one, for example with `rollcast broker`, or correct bootstrap_servers (--bootstrap, "
            "ROLLCAST_BOOTSTRAP_SERVERS)"
        )


class TopicsError(ConsumerError):
    """Topics are missing or could not be created."""


class AssemblerFullError(ConsumerError):
    """There is no room for a record; nothing is lost, since its offset is not committed.

    Attributes:
        needed_bytes: what the record takes.
        resident_bytes: bytes held by unfinished rollouts.
        limit: the cap.
    """

    def __init__(self, needed_bytes: int, resident_bytes: int, limit: int, open_rollouts: int) -> None:
        self.needed_bytes, self.resident_bytes, self.limit = needed_bytes, resident_bytes, limit
        super().__init__(
            f"a record takes {needed_bytes} bytes, and {open_rollouts} unfinished rollouts hold {resident_bytes}: that "
            f"is above max_resident_bytes={limit}; raise it if the memory is there, or spread the partitions over more "
            "group members; nothing is lost"
        )


class ScratchFullError(ConsumerError):
    """There is no room for the tensors of a record; its offset is not committed.

    Attributes:
        needed_bytes: what they take.
        used_bytes: size of the scratch files.
        limit: the cap.
    """

    retriable: ClassVar[bool] = True

    def __init__(self, needed_bytes: int, used_bytes: int, limit: int) -> None:
        self.needed_bytes, self.used_bytes, self.limit = needed_bytes, used_bytes, limit
        super().__init__(
            f"{needed_bytes} bytes are needed where unfinished rollouts take {used_bytes} of "
            f"max_scratch_bytes={limit}; raise it if the disk has room"
        )


class InvalidRecordError(ConsumerError):
    """A well-formed event that contradicts itself or what is known of its rollout."""


class ConflictError(InvalidRecordError):
    """A closing event that contradicts one that is held.

    Attributes:
        rank: data-parallel rank whose closing event is contradicted, if it is one rank's alone.
    """

    def __init__(self, problem: str, rank: int | None = None) -> None:
        self.rank = rank
        super().__init__(problem)


class LayoutError(ConsumerError):
    """A rollout that the chosen layout cannot hold."""


class QuotaError(ConsumerError, OSError):
    """A dump does not fit into the quota of its run, which somebody has to raise."""


class DumpFileError(ConsumerError):
    """A file that is not a readable dump."""


class ShutFileError(DumpFileError):
    """A file that this user may not read, so that nothing is known of it."""


class NoDumpError(DumpFileError):
    """A torch file of something else; not a dump that was damaged, since what tells so has its checksum."""


class ConsumeError(ConsumerError):
    """Kafka refused something for good, such as a missing permission."""


class ShutdownTimeoutError(ConsumerError):
    """Open work did not end within the shutdown's bound; its records will be read again."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(
            f"shutdown did not finish within {timeout_s:g} s; unfinished work is abandoned, its records come again"
        )
