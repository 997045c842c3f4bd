"""A bundle that kills the process which ships its spool and others."""

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

from fixtures.shipping import closed, direct, publish
from fixtures.topic import payload_in, read_until, shards_in
from rollcast.consumer.broker import Broker
from rollcast.consumer.difference import differences
from rollcast.producer.shipper.claims import FORGIVEN_DEATHS, MAX_DEATHS, Claims
from rollcast.producer.spool.folder import SpoolFolder


async def _run(*command: str) -> int:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return (await asyncio.to_thread(subprocess.run, command, env=environment, timeout=60, check=False)).returncode


async def test_a_deadly_bundle_leaves_few_marks_in_other_spools_and_holds_them_up_for_few_deaths(
    broker: Broker, tmp_path: Path
) -> None:
    prefix = f"test-{uuid.uuid4().hex[:12]}"
    deadly, other = tmp_path / "deadly", tmp_path / "other"
    publish(deadly, 0)
    ((_, guilty),) = SpoolFolder(deadly).bundles()
    publish(other, 1, 2)
    command = (sys.executable, "-m", "fixtures.deadly_spool", str(guilty), f"--spool={deadly}", f"--spool={other}")
    kafka = (f"--bootstrap={broker.bootstrap_servers}", f"--topic-prefix={prefix}", "--stop-with-trainers")
    rollout_ids, arrived_after, most_marks, claims = [1, 2], 0, 0, Claims()
    for deaths in (1, 2, 3, 4, MAX_DEATHS):
        (guilty / "shipping").write_bytes(b"." * (deaths - 1))
        assert await _run(*command, *kafka) == -signal.SIGKILL
        assert claims.deaths(guilty) == deaths
        waiting = SpoolFolder(other).bundles()
        most_marks = max([most_marks, *(claims.deaths(path) for _, path in waiting)])
        arrived_after = arrived_after or (0 if waiting else deaths)
        # There is always a bundle that could be blamed.
        rollout_ids.append(deaths + 2)
        publish(other, rollout_ids[-1])
    assert most_marks <= 1
    assert 0 < arrived_after <= FORGIVEN_DEATHS + 2
    assert await _run(*command, *kafka) == 0
    events = await read_until(broker.bootstrap_servers, f"{prefix}.records", closed(0, *rollout_ids))
    assert "shippers died" in (shards_in(events, 0)[0].dropped_reason or "")
    for rollout_id in rollout_ids:
        assert not differences(payload_in(events, rollout_id), direct(rollout_id))
