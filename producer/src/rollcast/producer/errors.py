"""Errors of the training side. None of them leaves `publish` unless the publisher is strict."""

from typing import ClassVar

from rollcast.schemas.errors import RolloutDataError
from rollcast.schemas.events import DpShard

__all__ = [
    "BundleExistsError",
    "ControlError",
    "ProducerError",
    "RolloutDataError",
    "ShipperError",
    "ShipperRefusedError",
    "SpoolError",
    "SpoolFullError",
    "UnusableBundleError",
]


class ProducerError(Exception):
    """Root of the errors of `rollcast.producer`."""

    retriable: ClassVar[bool] = False


class ControlError(ProducerError):
    """The ranks cannot agree any more, because one of them does not answer."""


class SpoolError(ProducerError):
    """The spool folder or a bundle in it cannot be used; the message names the path."""


class SpoolFullError(SpoolError):
    """The spool has no room for a bundle."""

    retriable: ClassVar[bool] = True


class BundleExistsError(SpoolError):
    """The spool has a bundle of this name already."""


class UnusableBundleError(SpoolError):
    """A committed bundle cannot be shipped.

    Attributes:
        shard: its closing event, if that is whole.
    """

    def __init__(self, problem: str, shard: DpShard | None) -> None:
        super().__init__(problem)
        self.shard = shard


class ShipperError(ProducerError):
    """The shipper cannot start or go on; the message says what to change."""


class ShipperRefusedError(ShipperError):
    """Kafka answers and refuses this shipper, which waiting will hardly mend; one with other settings may do better."""
