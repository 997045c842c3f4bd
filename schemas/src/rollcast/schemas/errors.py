"""Errors of the wire contract and the dump contract."""

from typing import ClassVar


class ContractError(Exception):
    """Root of the errors of `rollcast.schemas`."""

    retriable: ClassVar[bool] = False


class DecodeError(ContractError):
    """Bytes that are not a valid event: cut, padded, corrupt or hostile."""


class UnknownSchemaError(DecodeError):
    """The frame names a writer schema that this version does not know.

    Attributes:
        fingerprint: CRC-64-AVRO of the writer schema, as it stood in the frame.
    """

    def __init__(self, fingerprint: bytes) -> None:
        self.fingerprint = fingerprint
        super().__init__(
            f"unknown Avro schema fingerprint {fingerprint.hex()}: written by a newer rollcast or by another program; "
            "upgrade this reader, or check what writes to the topic"
        )


class LimitError(DecodeError):
    """A size or count in a record is above its cap, found before anything of that size was allocated.

    Attributes:
        what: the quantity, as named in `Limits`.
        found: its value in the record.
        limit: the cap.
    """

    def __init__(self, what: str, found: int, limit: int) -> None:
        self.what, self.found, self.limit = what, found, limit
        super().__init__(f"{what} is {found}, above the limit of {limit}; raise the limit if the data is genuine")


class EncodeError(ContractError):
    """An event does not fit its schema; a mistake of the writing program."""


class RolloutDataError(ContractError, ValueError):
    """`rollout_data` is not what the dump contract needs; the message names the column and the counts."""


class ShardContentError(DecodeError):
    """The parts of one slot do not form its content: a gap, an overlap, or a digest that differs.

    Attributes:
        slot: the slot within its shard, -1 for the shard's own columns.
    """

    def __init__(self, slot: int, problem: str) -> None:
        self.slot = slot
        super().__init__(f"slot {slot}: {problem}")
