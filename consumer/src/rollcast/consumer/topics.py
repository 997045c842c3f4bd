"""Finds the broker and the topics at start."""

import asyncio
import logging
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaConnectionError, KafkaError, TopicAlreadyExistsError, for_code

from rollcast.consumer.config import ConsumeConfig
from rollcast.consumer.errors import BrokerUnreachableError, TopicsError
from rollcast.consumer.kafka_client import client_options
from rollcast.schemas.kafka_access import explain
from rollcast.schemas.sizes import counted

_RETRY_AFTER_S = 0.5

_log = logging.getLogger("rollcast.consumer")


async def prepare_topics(config: ConsumeConfig) -> None:
    """Returns when a broker answers and the topics exist; creates them where the config says so.

    Raises:
        BrokerUnreachableError: no broker answers within `connect_timeout_s`.
        KafkaRefusedError: one answers and refuses the security settings.
        TopicsError: topics are missing, or could not be created.
    """
    problem: object = "no answer"
    try:
        async with asyncio.timeout(config.connect_timeout_s):
            while True:
                try:
                    admin = await _connect(config)
                    try:
                        return await _ensure_topics(admin, config)
                    finally:
                        await admin.close()
                except (KafkaError, OSError) as exc:
                    if isinstance(exc, KafkaError) and not exc.retriable:
                        raise TopicsError(f"the topics could not be prepared: {exc!r}") from exc
                    problem = exc
                await asyncio.sleep(_RETRY_AFTER_S)
    except TimeoutError as exc:
        raise BrokerUnreachableError(config.bootstrap_servers, config.connect_timeout_s, problem) from exc


async def _connect(config: ConsumeConfig) -> Any:
    admin = AIOKafkaAdminClient(**client_options(config), request_timeout_ms=int(config.connect_timeout_s * 1000))
    try:
        await admin.start()
    except (KafkaConnectionError, ValueError):
        await admin.close()
        # Not chained: what an authenticator says may hold what it was given.
        raise KafkaConnectionError(await explain(config.bootstrap_servers, config.security)) from None
    except BaseException:
        await admin.close()
        raise
    return admin


async def _ensure_topics(admin: Any, config: ConsumeConfig) -> None:
    topics = config.topics
    settings = topics.settings(config.replication_factor)
    existing = set(await admin.list_topics())
    missing = [name for name in settings if name not in existing]
    if not missing:
        return
    if not config.create_topics:
        raise TopicsError(
            f"{counted(len(missing), 'topic')} missing at {config.bootstrap_servers}: {', '.join(missing)}; create "
            "what is missing, let `rollcast consume` do it (--create-topics), or correct --topic-prefix"
        )
    response = await admin.create_topics(
        [
            NewTopic(
                name,
                num_partitions=config.partitions if name == topics.records else 1,
                replication_factor=config.replication_factor,
                topic_configs=settings[name],
            )
            for name in missing
        ]
    )
    created = [name for name, code, *_ in response.topic_errors if not code]
    if created:
        made = counted(len(created), "topic")
        _log.info("created %s at %s: %s", made, config.bootstrap_servers, ", ".join(created))
    for name, code, *message in response.topic_errors:
        # Another member of the group may have been quicker.
        if code and for_code(code) is not TopicAlreadyExistsError:
            raise TopicsError(f"topic {name} could not be created: {for_code(code).__name__} {message}")
