"""Settings of a records topic that endanger what is sent to it."""

from collections.abc import Mapping

BATCH_OVERHEAD_BYTES = 4 * 1024
"""The topic's limit is on the batch: its header, the record's header and the key take this much."""

_SHORT_RETENTION_MS = 24 * 3_600_000
_SMALL_RETENTION_BYTES = 10 * 1024**3


def dangers(settings: Mapping[str, str], replicas: int, max_part_bytes: int) -> list[str]:
    """Returns what may lose, delay or repack records, each with the setting and the remedy; unknown settings pass.

    Args:
        settings: of the topic.
        replicas: of the partition that has the fewest.
        max_part_bytes: largest record that will be sent.
    """
    found = []

    def number(name: str) -> int | None:
        return int(settings[name]) if name in settings else None

    in_sync = number("min.insync.replicas")
    if in_sync is not None and replicas > 1 and in_sync == 1:
        found.append(
            f"min.insync.replicas is 1 with {replicas} replicas, so one broker that dies may take acknowledged records "
            f"with it; set it to {replicas // 2 + 1}"
        )
    if in_sync is not None and in_sync > replicas:
        found.append(f"min.insync.replicas is {in_sync} with {replicas} replicas, so nothing can be written; lower it")
    if settings.get("unclean.leader.election.enable") == "true":
        found.append("unclean.leader.election.enable is true, which may lose acknowledged records; set it to false")
    if "compact" in settings.get("cleanup.policy", ""):
        found.append("cleanup.policy compacts, which removes all but one record of each rollout; set it to delete")
    retention_ms = number("retention.ms")
    if retention_ms is not None and 0 <= retention_ms < _SHORT_RETENTION_MS:
        found.append(
            f"retention.ms is {retention_ms}, so records go when consumers are away for {retention_ms / 3_600_000:.1f} "
            f"hours; set it to {_SHORT_RETENTION_MS} or more"
        )
    retention_bytes = number("retention.bytes")
    if retention_bytes is not None and 0 <= retention_bytes < _SMALL_RETENTION_BYTES:
        found.append(
            f"retention.bytes is {retention_bytes}, so a few rollouts push unread ones out; set it to -1 or to "
            f"{_SMALL_RETENTION_BYTES} or more"
        )
    compression = settings.get("compression.type", "producer")
    if compression not in ("producer", "uncompressed"):
        found.append(
            f"compression.type is {compression}, so the brokers compress again what is compressed already; "
            "set it to uncompressed"
        )
    limit = number("max.message.bytes")
    if limit is not None and limit - BATCH_OVERHEAD_BYTES < max_part_bytes:
        found.append(
            f"max.message.bytes is {limit}, too little for parts of {max_part_bytes} bytes, so they are cut smaller; "
            f"set it to {max_part_bytes + BATCH_OVERHEAD_BYTES} or lower max_part_bytes"
        )
    return found
