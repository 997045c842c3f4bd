"""Topic names, record keys and run ids."""

import hashlib
import re
from dataclasses import dataclass
from urllib.parse import quote

from rollcast.schemas.errors import ContractError
from rollcast.schemas.events import TRAIN_STREAM
from rollcast.schemas.limits import DEFAULT_LIMITS

_PREFIX = re.compile(r"[A-Za-z0-9._-]{1,200}\Z")
_MAX_NAME_BYTES = 120
_RETENTION_MS = 7 * 24 * 3_600_000


@dataclass(frozen=True, slots=True)
class Topics:
    """The four topics of one installation.

    Attributes:
        prefix: first part of every name; letters, digits, dot, underscore and hyphen.
    """

    prefix: str = "rollcast"

    def __post_init__(self) -> None:
        """Refuses a prefix that Kafka would refuse."""
        if not _PREFIX.match(self.prefix) or self.prefix in {".", ".."}:
            raise ContractError(
                f"topic prefix {self.prefix!r} is not valid: use 1 to 200 letters, digits, '.', '_' or '-'"
            )

    @property
    def records(self) -> str:
        """Samples and shard events."""
        return f"{self.prefix}.records"

    @property
    def metrics(self) -> str:
        """`MetricPoint`s, compacted."""
        return f"{self.prefix}.metrics"

    @property
    def dumps(self) -> str:
        """`DumpCompleted` announcements."""
        return f"{self.prefix}.dumps"

    @property
    def dead_letters(self) -> str:
        """Records that could not be used."""
        return f"{self.prefix}.dead-letters"

    def settings(self, replication_factor: int) -> dict[str, dict[str, str]]:
        """Returns the configuration with which each topic is created."""
        # What one broker alone has acknowledged is lost with it; that a minority is away must not stop anybody.
        durable = {"min.insync.replicas": str(replication_factor // 2 + 1)}
        return {
            # The parts are compressed by us; the broker must not do it again. It expands what others compress, and
            # refuses what is too large then: a client would expand it without any bound.
            self.records: {"compression.type": "uncompressed", "retention.ms": str(_RETENTION_MS), **durable},
            self.metrics: {"cleanup.policy": "compact", **durable},
            self.dumps: durable,
            self.dead_letters: durable,
        }


def record_key(run_id: str, rollout_id: int, stream: str = TRAIN_STREAM) -> bytes:
    """Returns the Kafka key that puts all records of one rollout into one partition."""
    return f"{run_id}/{rollout_id}".encode() if stream == TRAIN_STREAM else f"{run_id}/{stream}/{rollout_id}".encode()


def check_run_id(run_id: str) -> str:
    """Returns `run_id` if records can carry it.

    Raises:
        ContractError: it is empty, too long, or not encodable as UTF-8.
    """
    if not run_id or len(run_id) > DEFAULT_LIMITS.max_run_id_chars:
        raise ContractError(f"run id has {len(run_id)} characters; it needs 1 to {DEFAULT_LIMITS.max_run_id_chars}")
    try:
        run_id.encode()
    except UnicodeEncodeError as exc:
        raise ContractError(f"run id {run_id!r} is not valid Unicode; choose another") from exc
    return run_id


def file_name_for(run_id: str) -> str:
    """Returns a name for `run_id` that is safe as one path component; distinct ids give distinct names.

    Letters, digits and `_-.` stay as they are (a leading dot does not), the rest is percent-encoded; a name over
    120 bytes is cut and ends with a hash of the whole id.
    """
    name = quote(check_run_id(run_id), safe="")
    if name.startswith("."):
        name = "%2E" + name[1:]
    if len(name) <= _MAX_NAME_BYTES:
        return name
    # "%+" is never produced by quote(), so a cut name cannot equal a whole one.
    return f"{name[:80]}%+{hashlib.sha256(run_id.encode()).hexdigest()[:32]}"
