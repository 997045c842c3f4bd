"""Reads the records topic with a Kafka client of its own, from the beginning, and prints each sample that is whole.

All records of a rollout have one key, `run_id/rollout_id`, so one partition has them. A sample is one or several parts;
they may come in any order and more than once. What a higher attempt sends replaces the rollout of a lower one. The
README says how to run it.
"""

import asyncio
import logging
import os
from collections import defaultdict
from typing import Any

import torch
from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaConnectionError

from rollcast.schemas import SHARD_SLOT, TRAIN_STREAM, ContractError, DpShard, SamplePart, Topics, decode
from rollcast.schemas.joining import join, unpack_large_values
from rollcast.schemas.tensors import unflatten


class Slots:
    """The slots whose parts have not all come yet: samples, and what belongs to a whole shard.

    A slot that is sent again, by a shipper that was restarted, is whole again: whoever must not count it twice keeps
    its identity, the key of `_parts`. Parts whose others never come stay here.
    """

    def __init__(self) -> None:
        self._parts: defaultdict[tuple[str, int, str, int, int, int], dict[int, SamplePart]] = defaultdict(dict)

    def add(self, part: SamplePart) -> dict[str, Any] | None:
        """Returns the columns of the part's slot, if that is whole now.

        Raises:
            DecodeError: its parts do not fit together.
        """
        slot = part.run_id, part.attempt, part.stream, part.rollout_id, part.data_parallel_rank, part.slot
        self._parts[slot].setdefault(part.part, part)
        if len(self._parts[slot]) < part.part_count:
            return None
        parts = self._parts.pop(slot)
        # What `DpShard.slot_digests` announces is `rollcast.schemas.parts.content_digest(joined)`.
        joined = join([parts[number] for number in sorted(parts)])
        return unflatten(unpack_large_values(joined))


def describe(event: SamplePart | DpShard, slots: Slots) -> str | None:
    """Returns a line on the sample or the shard that is whole with this event; None if nothing is."""
    where = f"{event.run_id} attempt {event.attempt} rollout {event.rollout_id} shard {event.data_parallel_rank}"
    if isinstance(event, DpShard):
        end = f"closed, sample_count {event.sample_count}" if event.dropped_reason is None else event.dropped_reason
        return f"{where} of {event.data_parallel_size}: {end}"
    columns = slots.add(event)
    if columns is None:
        return None
    slot = "shard's own" if event.slot == SHARD_SLOT else f"sample {event.slot} (position {event.rollout_position})"
    return f"{where} {slot}: {', '.join(f'{name} {shown(columns[name])}' for name in sorted(columns))}"


def shown(value: object) -> str:
    """Returns a value, or the shape of a tensor, as text."""
    return str(list(value.shape)) if isinstance(value, torch.Tensor) else repr(value)


async def main() -> None:
    """Prints what comes, until it is stopped."""
    servers = os.environ.get("ROLLCAST_BOOTSTRAP_SERVERS")
    if not servers:
        raise SystemExit("set ROLLCAST_BOOTSTRAP_SERVERS to Kafka's address, host:port")
    # No group: it gets all partitions, and commits nothing.
    consumer = AIOKafkaConsumer(Topics().records, bootstrap_servers=servers, auto_offset_reset="earliest")
    slots = Slots()
    # It would tell of a Kafka that does not answer, too.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    try:
        await consumer.start()
        logging.getLogger("aiokafka").setLevel(logging.NOTSET)
        async for record in consumer:
            where = f"{record.topic}[{record.partition}]@{record.offset}"
            try:
                event = decode(record.value or b"")
                if isinstance(event, (SamplePart, DpShard)) and event.stream == TRAIN_STREAM:
                    line = describe(event, slots)
                    if line is not None:
                        print(line, flush=True)
            except ContractError as error:
                # A stranger's record, or a damaged one: the next one may be good.
                print(f"{where} is not used: {error}", flush=True)
    except KafkaConnectionError:
        raise SystemExit(f"no Kafka answers at {servers}") from None
    finally:
        await consumer.stop()


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        print("stopped", flush=True)
