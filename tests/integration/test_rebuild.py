"""Dumps again from the records: the same ones, or what is missing."""

import asyncio
import errno
import io
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, RecordsToDelete

from fixtures.frames import events_of, frames_of
from fixtures.installation import PART_BYTES, Installation, keyed, running, shards
from fixtures.stored import dump
from rollcast.consumer.config import ConsumeConfig
from rollcast.consumer.errors import ConsumeError
from rollcast.consumer.rebuilding import Rebuilt, rebuild
from rollcast.consumer.retention import Retention
from rollcast.consumer.store import LocalDumpStore
from rollcast.schemas import SamplePart, encode


async def rebuilt(config: ConsumeConfig, *rollout_ids: int) -> list[Rebuilt]:
    return [each async for each in rebuild(replace(config, create_topics=False), "run", rollout_ids)]


async def published(installed: Installation, *rollout_ids: int, keep_last: int | None = None) -> None:
    async with running(replace(installed.config, retention=Retention(keep_last=keep_last))):
        for count, rollout_id in enumerate(rollout_ids, 1):
            made = frames_of("run", 1, rollout_id, shards(rollout_id), max_part_bytes=PART_BYTES)
            await installed.send(keyed("run", rollout_id, made))
            # What is removed depends on their order.
            await installed.dumps(count)


def without_file_and_manifest(folder: Path) -> None:
    (folder / "1.pt").unlink()
    (folder / "1.pt.manifest.json").unlink()


def damaged(folder: Path) -> None:
    path = folder / "1.pt"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda folder: (folder / "1.pt").unlink(), "rebuilt, byte for byte as before"),
        (without_file_and_manifest, "rebuilt"),
        (damaged, "rebuilt, byte for byte as before"),
    ],
)
async def test_a_lost_or_damaged_dump_is_made_again(
    installed: Installation, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], object], told: str
) -> None:
    await published(installed, 1, 2)
    folder = installed.folder / "run"
    before = (folder / "1.pt").read_bytes()
    harm(folder)
    left = {path.name: path.read_bytes() for path in folder.glob("1.pt")}

    first, second = await rebuilt(installed.config, 2, 1)

    assert first == Rebuilt(2, "its dump is there, as the manifest says", done=True)
    assert second.done
    assert second.told.endswith(told)
    assert (folder / "1.pt").read_bytes() == before
    installed.check("run", 1, shards(1))
    # What was damaged is kept, not overwritten.
    assert [path.read_bytes() for path in folder.glob("*.unknown-*.pt")] == list(left.values())
    assert caplog.text.count("its content is not that of the dump that gets its name") == len(left)
    assert [each.done for each in await rebuilt(installed.config, 1)] == [True]


async def test_a_dump_that_this_user_may_not_read_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ConsumeConfig(bootstrap_servers="127.0.0.1:1", dump_path=f"{tmp_path}/{{run_id}}/{{rollout_id}}.pt")
    path = LocalDumpStore.of(config).publish(dump(1)).path
    before = {each: each.read_bytes() for each in path.parent.iterdir()}
    opens = io.open

    def refuse(file: Any, *rest: Any, **options: Any) -> Any:
        if file == path:
            # Not by the file's mode, which root may pass by.
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return opens(file, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(io, "open", refuse)
        (left,) = await rebuilt(config, 1)
    assert not left.done
    assert left.told.endswith("cannot be read: Permission denied; it may be sound, so it was left as it is")
    assert {each: each.read_bytes() for each in path.parent.iterdir()} == before


async def test_a_rollout_is_made_again_with_less_memory_than_its_tensors_take(installed: Installation) -> None:
    large = shards(1, samples=8, tokens=20_000)
    assert sum(tensor.nbytes for shard in large for tensor in shard.rollout_data["tokens"]) > 2**20
    await installed.send(keyed("run", 1, frames_of("run", 1, 1, large, max_part_bytes=PART_BYTES)))

    (again,) = await rebuilt(replace(installed.config, max_resident_bytes=2**20), 1)

    assert again.done
    installed.check("run", 1, large)


async def test_a_dump_that_the_retention_has_removed_is_made_again(installed: Installation) -> None:
    await published(installed, 1, 2, keep_last=1)
    folder = installed.folder / "run"
    assert {path.name for path in folder.glob("1.*")} == {"1.pt.removed.json"}

    (again,) = await rebuilt(installed.config, 1)

    assert again.done
    assert {path.name for path in folder.glob("1.*")} == {"1.pt", "1.pt.manifest.json"}
    installed.check("run", 1, shards(1))


async def test_with_no_manifest_the_highest_attempt_on_the_topic_is_made(installed: Installation) -> None:
    await installed.send(keyed("run", 1, frames_of("run", 1, 1, shards(1))))
    await installed.send(keyed("run", 1, frames_of("run", 2, 1, shards(2))))

    (again,) = await rebuilt(installed.config, 1)

    assert again.done
    installed.check("run", 1, shards(2))


async def test_records_are_found_although_partitions_were_added(installed: Installation) -> None:
    await installed.send(keyed("run", 1, frames_of("run", 1, 1, shards(1))))
    admin = AIOKafkaAdminClient(bootstrap_servers=installed.config.bootstrap_servers)
    await admin.start()
    try:
        await admin.create_partitions({installed.topics.records: NewPartitions(total_count=7)})
    finally:
        await admin.close()

    (again,) = await rebuilt(installed.config, 1)

    assert again.done
    installed.check("run", 1, shards(1))


async def test_what_is_missing_is_named(installed: Installation) -> None:
    events = [
        event
        for event in events_of("run", 1, 1, shards(1))
        if not (isinstance(event, SamplePart) and (event.data_parallel_rank, event.slot) == (1, 2))
    ]
    await installed.send([*keyed("run", 1, map(encode, events)), *keyed("run", 1, [b"garbage"])])

    one, two = await rebuilt(installed.config, 1, 2)

    assert not one.done
    assert one.told.startswith("1 slot not whole (shard/slot 1/2); ")
    assert not two.done
    assert two.told.startswith("none of its records is there (the runs that were seen: 'run'); ")
    assert not list(installed.folder.rglob("*.pt"))


async def test_a_mistyped_run_is_told_with_the_runs_that_are_there(installed: Installation) -> None:
    for number in range(6):
        await installed.send(keyed(f"run-{number}", 1, frames_of(f"run-{number}", 1, 1, shards(1))))

    (typo,) = await rebuilt(installed.config, 1)

    assert not typo.done
    assert typo.told.startswith(
        "none of its records is there (the runs that were seen: 'run-0', 'run-1', 'run-2', 'run-3', 'run-4', ...); "
    )


async def test_a_folder_at_the_name_of_the_dump_is_told_with_the_remedy(installed: Installation) -> None:
    await installed.send(keyed("run", 1, frames_of("run", 1, 1, shards(1))))
    path = installed.folder / "run" / "1.pt"
    path.mkdir(parents=True)

    with pytest.raises(ConsumeError) as told:
        await rebuilt(installed.config, 1)

    assert str(told.value).endswith(f"{path}: a folder has the name of the dump; move that folder away")


async def test_records_of_another_content_do_not_pass_for_the_dump_that_was_there(installed: Installation) -> None:
    await published(installed, 1)
    path = installed.folder / "run" / "1.pt.manifest.json"
    content = json.loads(path.read_text())
    content["digests"]["0"] = "0" * 64
    path.write_text(json.dumps(content))
    (installed.folder / "run" / "1.pt").unlink()

    (again,) = await rebuilt(installed.config, 1)

    assert not again.done
    assert "another content" in again.told


async def test_the_command_disturbs_no_group_and_exits_1_if_the_records_are_gone(installed: Installation) -> None:
    await published(installed, 1)
    servers, records = installed.config.bootstrap_servers, installed.topics.records
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()

    async def command() -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollcast.consumer.cli", "rebuild", "--run", "run", "--rollout", "1..2"),
            *("--dump-path", installed.config.dump_path, "--topic-prefix", installed.topics.prefix),
            env={**os.environ, "ROLLCAST_BOOTSTRAP_SERVERS": servers},
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
        return process.returncode, out.decode()

    try:
        await installed.send(keyed("run", 2, frames_of("run", 1, 2, shards(2))))
        groups = await admin.list_consumer_groups()
        committed = await admin.list_consumer_group_offsets(installed.config.group_id)
        assert await command() == (
            0,
            f"rollout 1: its dump is there, as the manifest says\nrollout 2: {installed.folder}/run/2.pt is rebuilt\n"
            f"To check them: rollcast verify {installed.folder}/run\n",
        )
        assert await admin.list_consumer_groups() == groups
        assert await admin.list_consumer_group_offsets(installed.config.group_id) == committed
        for path in (installed.folder / "run").glob("*.pt"):
            path.unlink()
        everything = RecordsToDelete(before_offset=-1)
        partitions = range(installed.config.partitions)
        await admin.delete_records({TopicPartition(records, partition): everything for partition in partitions})
        status, told = await command()
    finally:
        await admin.close()

    assert status == 1
    assert told.count("cannot be rebuilt: none of its records is there") == 2
    assert f"{records} begins at offset" in told
