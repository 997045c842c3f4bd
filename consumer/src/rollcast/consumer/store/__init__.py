"""Where dumps are kept."""

from rollcast.consumer.store.local import LocalDumpStore
from rollcast.consumer.store.manifest import Manifest
from rollcast.consumer.store.protocol import Dump, DumpStore, PublishedDump

__all__ = ["Dump", "DumpStore", "LocalDumpStore", "Manifest", "PublishedDump"]
