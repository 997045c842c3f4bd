"""What an event of the records topic must satisfy on its own, before the assembler believes it."""

from rollcast.consumer.errors import InvalidRecordError
from rollcast.consumer.streams import is_known
from rollcast.schemas import SHARD_SLOT, ContractError, DpShard, Limits, SamplePart
from rollcast.schemas.sizes import counted
from rollcast.schemas.topics import check_run_id

_MAX_LONG = 2**63 - 1


def check_event(event: SamplePart | DpShard, limits: Limits) -> None:
    """Returns if the event is consistent in itself and within `limits`.

    Raises:
        InvalidRecordError: it is not; the message names the field.
    """
    try:
        check_run_id(event.run_id)
    except ContractError as exc:
        raise InvalidRecordError(str(exc)) from exc
    if not is_known(event.stream):
        raise InvalidRecordError(f"stream is {event.stream[:80]!r}; known are train and policy-loss/<rank>")
    _within("rollout_id", event.rollout_id, 0, _MAX_LONG)
    if isinstance(event, SamplePart):
        _within("part_count", event.part_count, 1, limits.max_parts)
        _within("part", event.part, 0, event.part_count - 1)
        _within("slot", event.slot, SHARD_SLOT, limits.max_samples - 1)
        _within("data_parallel_rank", event.data_parallel_rank, 0, limits.max_shards - 1)
        return
    _within("data_parallel_size", event.data_parallel_size, 1, limits.max_shards)
    _within("data_parallel_rank", event.data_parallel_rank, 0, event.data_parallel_size - 1)
    _within("sample_count", event.sample_count, 0, limits.max_samples)
    if event.raw_bytes < 0:
        raise InvalidRecordError(f"raw_bytes is {event.raw_bytes}")
    if event.dropped_reason is None and len(event.slot_digests) != event.sample_count + 1:
        raise InvalidRecordError(
            f"the closing event has {counted(len(event.slot_digests), 'slot digest')} for "
            f"{counted(event.sample_count, 'sample')}; "
            "it needs one for each, and one for the shard's own columns"
        )
    if event.dropped_reason is None and len(event.part_counts) != len(event.slot_digests):
        raise InvalidRecordError(
            f"the closing event has {counted(len(event.part_counts), 'part count')} for "
            f"{counted(len(event.slot_digests), 'slot digest')}"
        )
    for count in event.part_counts:
        _within("part_counts", count, 1, limits.max_parts)


def _within(field: str, value: int, lowest: int, highest: int) -> None:
    if not lowest <= value <= highest:
        raise InvalidRecordError(f"{field} is {value}, outside {lowest}..{highest}")
