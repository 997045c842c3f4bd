"""Where reading starts: the group's committed offsets, for certain."""

from collections.abc import Collection
from typing import Any

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import NotCoordinatorForGroupError

from rollcast.consumer.config import ConsumeConfig
from rollcast.consumer.kafka_client import client_options

_NOTHING_COMMITTED = -1


class Positions:
    """Looks up where to start.

    aiokafka takes an answer without offsets for "nothing is committed" even where the broker says that it is not the
    group's coordinator (any more), as it does for a moment whenever the coordinator moves. The consumer would then
    read the whole topic again. Here only an explicit "nothing" counts.
    """

    def __init__(self, config: ConsumeConfig) -> None:
        self._group_id = config.group_id
        self._admin: Any = AIOKafkaAdminClient(**client_options(config))

    async def start(self) -> None:
        """Connects."""
        await self._admin.start()

    async def stop(self) -> None:
        """Disconnects."""
        await self._admin.close()

    async def starts(self, consumer: Any, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Returns the group's committed offset of each partition; the first one there is, where none is committed.

        Raises:
            KafkaError: it cannot be told now.
        """
        if not partitions:
            return {}
        found = await self._admin.list_consumer_group_offsets(self._group_id, partitions=list(partitions))
        if not found.keys() >= set(partitions):
            raise NotCoordinatorForGroupError(self._group_id)
        committed = {at: found[at].offset for at in partitions if found[at].offset != _NOTHING_COMMITTED}
        new = [partition for partition in partitions if partition not in committed]
        return committed | (await consumer.beginning_offsets(new) if new else {})
