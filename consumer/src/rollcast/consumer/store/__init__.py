"""Where dumps are kept."""

from rollcast.consumer.store.local import LocalDumpStore
from rollcast.consumer.store.manifest import Manifest
from rollcast.consumer.store.protocol import Dump, DumpStore, PublishedDump, dump_of

__all__ = ["Dump", "DumpStore", "LocalDumpStore", "Manifest", "PublishedDump", "dump_of"]
