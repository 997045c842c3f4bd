"""The daemon with the layout of miles, and with dumps that the retention has removed."""

from dataclasses import replace
from typing import Any

import torch

from fixtures.frames import frames_of
from fixtures.installation import PART_BYTES, Installation, keyed, running, shards, until
from rollcast.consumer import differences
from rollcast.consumer.config import Layout
from rollcast.consumer.retention import Retention


async def test_with_the_layout_of_miles_each_shard_is_a_file_with_its_own_rollout_data(installed: Installation) -> None:
    path = f"{installed.folder}/{{run_id}}/{{rollout_id}}_{{rank}}.pt"
    config = replace(installed.config, layout=Layout.MILES, dump_path=path)
    async with running(config):
        await installed.send(keyed("run", 1, frames_of("run", 1, 1, shards(1), max_part_bytes=PART_BYTES)))
        (announced,) = await installed.dumps(1)

    assert announced.path == f"{installed.folder}/run/1_rank.pt.manifest.json"
    for source in shards(1):
        content: dict[str, Any] = torch.load(f"{installed.folder}/run/1_{source.rank}.pt", weights_only=True)
        data = content.pop("rollout_data")
        assert content == {"rollout_id": 1, "rank": source.rank, "cp_rank": 0, "cp_size": 1, "qkv_format": "thd"}
        assert data.keys() == source.rollout_data.keys()
        for name, value in source.rollout_data.items():
            assert differences(data[name], value) == []

    async with running(replace(config, group_id=f"{config.group_id}-again")) as daemon:
        await until(lambda: daemon.stats.already_published == 1)
        assert daemon.stats.dumps == 0


async def test_whoever_reads_everything_again_does_not_write_what_was_removed(installed: Installation) -> None:
    config = replace(installed.config, retention=Retention(keep_last=1), partitions=1)
    async with running(config):
        for rollout_id in (1, 2):
            await installed.send(keyed("run", rollout_id, frames_of("run", 1, rollout_id, shards(rollout_id))))
            await installed.dumps(rollout_id)
    before = installed.digests()

    async with running(replace(config, group_id=f"{config.group_id}-again")) as daemon:
        await until(lambda: daemon.stats.duplicates == 2 * len(frames_of("run", 1, 1, shards(1))))
        assert daemon.stats.dumps == 0
        assert daemon.stats.already_published == 2
        # Only the one that is there is announced again.
        announced = await installed.dumps(3)

    assert [dump.rollout_id for dump in announced] == [1, 2, 2]
    assert installed.digests() == before
    assert [path.name for path in (installed.folder / "run").glob("*.pt")] == ["2.pt"]
