"""The records topic: there, how large its records may be, and whether its settings keep them safe."""

import asyncio
import logging
import time
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    KafkaConnectionError,
    KafkaTimeoutError,
    TopicAlreadyExistsError,
    TopicAuthorizationFailedError,
    UnknownError,
    for_code,
)

from rollcast.producer.errors import ShipperRefusedError
from rollcast.producer.shipper.cancellation import pass_on_cancellation
from rollcast.producer.shipper.config import ShipperConfig
from rollcast.producer.shipper.safety import BATCH_OVERHEAD_BYTES, dangers
from rollcast.schemas.kafka_access import KafkaRefusedError, explain

_DEFAULT_MAX_MESSAGE_BYTES = 1_048_588

_log = logging.getLogger("rollcast.ship")


class RecordsTopic:
    """Looks after the records topic for all spools of a shipper.

    Attributes:
        found: set when Kafka has let this process in, and has the topic.
    """

    def __init__(self, config: ShipperConfig) -> None:
        self._config, self._name = config, config.topics.records
        self.found = asyncio.Event()
        self._warned = False
        self._since = self._tried_at = time.monotonic()
        self._answer = "no answer yet"

    @property
    def is_found(self) -> bool:
        """Whether Kafka has let this process in, and has the topic."""
        return self.found.is_set()

    @property
    def absence(self) -> str | None:
        """Why Kafka has not let this process in so far, and what to check; None once it has."""
        if self.is_found:
            return None
        now = time.monotonic()
        return (
            f"Kafka at {self._config.bootstrap_servers} has not let it in since it started {now - self._since:.0f} s "
            f"ago ({now - self._tried_at:.0f} s ago: {self._answer}): check that it runs, that bootstrap_servers "
            "(--bootstrap) is its address as seen from this machine, and ROLLCAST_SECURITY_PROTOCOL"
        )

    async def prepare(self) -> int:
        """Makes sure that the topic is there; returns the largest batch that it takes.

        Raises:
            KafkaError: no broker answers in time.
            ShipperRefusedError: the topic is missing, or the brokers refuse us.
        """
        # One connection, and a few requests on it.
        timeout_s = 2 * self._config.request_timeout_ms / 1000
        try:
            async with asyncio.timeout(timeout_s):
                limit = await self._prepare()
        except TimeoutError as exc:
            late = KafkaTimeoutError(f"no answer within {timeout_s:g} s")
            self._note(late)
            raise late from exc
        except Exception as exc:
            self._note(exc)
            raise
        self.found.set()
        return limit

    def _note(self, error: Exception) -> None:
        self._answer, self._tried_at = str(error) or type(error).__name__, time.monotonic()

    async def _prepare(self) -> int:
        admin: Any = AIOKafkaAdminClient(
            bootstrap_servers=self._config.bootstrap_servers,
            client_id="rollcast-ship",
            request_timeout_ms=self._config.request_timeout_ms,
            **self._config.security.client_options(),
        )
        try:
            try:
                await admin.start()
            except (KafkaConnectionError, ValueError):
                # Not chained: what an authenticator says may hold what it was given.
                raise KafkaConnectionError(await self._explain()) from None
            if self._name not in await admin.list_topics():
                await self._create(admin)
            settings = await self._settings(admin)
            if not self._warned:
                (topic,) = await admin.describe_topics([self._name])
                replicas = min((len(partition["replicas"]) for partition in topic["partitions"]), default=1)
                for danger in dangers(settings, replicas, self._config.max_part_bytes):
                    _log.warning("topic %s: %s", self._name, danger)
                self._warned = True
            return int(settings.get("max.message.bytes", _DEFAULT_MAX_MESSAGE_BYTES))
        finally:
            await admin.close()
            pass_on_cancellation()

    async def _explain(self) -> str:
        try:
            return await explain(self._config.bootstrap_servers, self._config.security)
        except KafkaRefusedError as exc:
            raise ShipperRefusedError(str(exc)) from None

    async def _create(self, admin: Any) -> None:
        config = self._config
        if not config.create_topics:
            raise ShipperRefusedError(
                f"topic {self._name} does not exist at {config.bootstrap_servers}: create it, allow rollcast-ship to "
                "(--create-topics), or correct --topic-prefix"
            )
        topic = NewTopic(
            name=self._name,
            num_partitions=config.partitions,
            replication_factor=config.replication_factor,
            topic_configs=config.topics.settings(config.replication_factor)[self._name],
        )
        for name, code, *message in (await admin.create_topics([topic])).topic_errors:
            if not code:
                _log.info("created the topic %s at %s", name, config.bootstrap_servers)
            # The consumer may have been quicker.
            elif for_code(code) is not TopicAlreadyExistsError:
                raise _refused(code, f"topic {name} cannot be created", message)

    async def _settings(self, admin: Any) -> dict[str, str]:
        """Returns the topic's settings; none, where we may write to it but not look at them."""
        settings: dict[str, str] = {}
        for response in await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, self._name)]):
            for code, message, _, _, entries in response.resources:
                if for_code(code) in (TopicAuthorizationFailedError, ClusterAuthorizationFailedError):
                    if not self._warned:
                        _log.warning(
                            "topic %s: its settings may not be read; allow DescribeConfigs to have them checked",
                            self._name,
                        )
                elif code:
                    raise _refused(code, f"the settings of topic {self._name} cannot be read", [message])
                settings |= {name: value for name, value, *_ in entries}
        return settings


def _refused(code: int, what: str, said: list[Any]) -> Exception:
    error: type[Exception] = for_code(code)
    # A code that the client does not know may pass by itself, too.
    if getattr(error, "retriable", False) or error is UnknownError:
        return error(f"{what}: {said}")
    return ShipperRefusedError(f"{what}: {error.__name__} {' '.join(str(part) for part in said if part)}".rstrip())


def part_limit(config: ShipperConfig, max_batch_bytes: int) -> int:
    """Returns the largest part for a topic that takes batches of at most `max_batch_bytes`."""
    return min(config.max_part_bytes, max_batch_bytes - BATCH_OVERHEAD_BYTES)
