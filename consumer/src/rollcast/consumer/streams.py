"""The streams that this version can turn into files."""

import re

from rollcast.schemas import TRAIN_STREAM

_KEY = re.compile(r"(.+?)(?:/policy-loss/\d+)?/\d+\Z", re.DOTALL)
_POLICY_LOSS = re.compile(r"policy-loss/(0|[1-9][0-9]{0,8})\Z")


def policy_loss_rank(stream: str) -> int | None:
    """Returns the rank whose policy-loss calls the stream has; None for another stream."""
    match = _POLICY_LOSS.match(stream)
    return int(match[1]) if match else None


def is_known(stream: str) -> bool:
    """Returns whether the stream is the train stream or one of policy-loss calls."""
    return stream == TRAIN_STREAM or policy_loss_rank(stream) is not None


def run_of_key(key: bytes) -> str | None:
    """Returns the run that the key of a record names, to be shown to a person; None if it is no such key."""
    match = _KEY.match(key.decode(errors="replace"))
    return match[1] if match else None
