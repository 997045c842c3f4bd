"""The records topic: there, and how large its records may be."""

from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import TopicAlreadyExistsError, for_code

from rollcast.producer.shipper.config import ShipperConfig


async def prepare_topic(config: ShipperConfig) -> int:
    """Makes sure that the topic is there; returns the largest batch that it takes.

    Raises:
        KafkaError: no broker answers, or the topic cannot be created.
    """
    admin: Any = AIOKafkaAdminClient(bootstrap_servers=config.bootstrap_servers, client_id="rollcast-ship")
    try:
        await admin.start()
        if config.topics.records not in await admin.list_topics():
            await _create(admin, config)
        return await _max_message_bytes(admin, config.topics.records)
    finally:
        await admin.close()


async def _create(admin: Any, config: ShipperConfig) -> None:
    topic = NewTopic(
        name=config.topics.records,
        num_partitions=config.partitions,
        replication_factor=config.replication_factor,
        topic_configs=config.topics.settings()[config.topics.records],
    )
    for name, code, *message in (await admin.create_topics([topic])).topic_errors:
        # The consumer may have been quicker.
        if code and for_code(code) is not TopicAlreadyExistsError:
            raise for_code(code)(f"topic {name} could not be created: {message}")


async def _max_message_bytes(admin: Any, topic: str) -> int:
    for response in await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)]):
        for code, message, _, _, entries in response.resources:
            if code:
                raise for_code(code)(f"the settings of topic {topic} cannot be read: {message}")
            for name, value, *_ in entries:
                if name == "max.message.bytes":
                    return int(value)
    raise for_code(-1)(f"topic {topic} does not tell its max.message.bytes")
