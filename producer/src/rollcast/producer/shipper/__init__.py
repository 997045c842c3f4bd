"""The shipper: the process that takes bundles from a spool to Kafka."""

from rollcast.producer.shipper.config import ShipperConfig
from rollcast.producer.shipper.shipper import Shipper

__all__ = ["Shipper", "ShipperConfig"]
