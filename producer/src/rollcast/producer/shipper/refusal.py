"""What Kafka refuses for good, told from what waiting mends."""

from aiokafka.errors import ClusterAuthorizationFailedError, TopicAuthorizationFailedError

from rollcast.producer.errors import ShipperRefusedError
from rollcast.producer.shipper.config import ShipperConfig


def refusal_of(error: BaseException, config: ShipperConfig) -> ShipperRefusedError | None:
    """Returns the refusal that is, or lies behind, an error of a shipment; None where there is none."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ShipperRefusedError):
            return cause
        if isinstance(cause, (TopicAuthorizationFailedError, ClusterAuthorizationFailedError)):
            return ShipperRefusedError(
                f"Kafka does not let {_who(config)} write to topic {config.topics.records} ({type(cause).__name__}): "
                "allow Write and Describe on the topic, and IdempotentWrite on an older cluster"
            )
        cause = cause.__cause__
    return None


def _who(config: ShipperConfig) -> str:
    user = config.security.sasl_username
    return f"user {user!r}" if user else "this client"
