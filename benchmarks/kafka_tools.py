"""The broker's own performance tools, on a topic of their own."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from rollcast.consumer.broker._jars import kafka_jars
from rollcast.consumer.broker._java import find_java

RECORD_BYTES = 900_000
_TOPIC = "kafka-tools"
_TIMEOUT_S = 300


def producer_mb_per_s(bootstrap_servers: str, records: int) -> float:
    """Returns what `ProducerPerformance` reaches with acks=all and records of 900 KB; makes the topic."""
    asyncio.run(_create_topic(bootstrap_servers))
    options = [f"--topic={_TOPIC}", f"--num-records={records}", f"--record-size={RECORD_BYTES}", "--throughput=-1"]
    settings = [f"bootstrap.servers={bootstrap_servers}", "acks=all"]
    output = _run("ProducerPerformance", *options, "--producer-props", *settings)
    # "1700 records sent, 178.9 records/sec (153.5 MB/sec), ..."; its MB are 2**20 bytes.
    rate = output.strip().splitlines()[-1].split(",")[1].split()[0]
    return float(rate) * RECORD_BYTES / 1e6


def consumer_mb_per_s(bootstrap_servers: str, records: int) -> float:
    """Returns what `ConsumerPerformance` reaches on what the producer tool has left, without its time to join.

    Removes the topic: its records would take the memory that the rollouts need.
    """
    options = [f"--bootstrap-server={bootstrap_servers}", f"--topic={_TOPIC}", f"--num-records={records}"]
    lines = [line.split(", ") for line in _run("ConsumerPerformance", *options).strip().splitlines() if ", " in line]
    row = dict(zip(lines[-2], lines[-1], strict=True))
    asyncio.run(_remove_topic(bootstrap_servers))
    return float(row["fetch.MB.sec"]) * 2**20 / 1e6


def _run(tool: str, *options: str) -> str:
    classes = os.pathsep.join(str(jar) for jar in kafka_jars(print))
    command = [str(find_java()), "-Xmx512m", "-cp", classes, f"org.apache.kafka.tools.{tool}", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{tool} ended with status {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


async def _create_topic(bootstrap_servers: str) -> None:
    async with _admin(bootstrap_servers) as admin:
        await admin.create_topics([NewTopic(name=_TOPIC, num_partitions=1, replication_factor=1)])


async def _remove_topic(bootstrap_servers: str) -> None:
    async with _admin(bootstrap_servers) as admin:
        await admin.delete_topics([_TOPIC])


@asynccontextmanager
async def _admin(bootstrap_servers: str) -> AsyncIterator[Any]:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap_servers)
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()
