"""Metrics and health over HTTP: what they say is so, and their number does not grow with what is sent."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fixtures.frames import events_of, frames_of
from fixtures.installation import Installation, installation, keyed, running, shards, until, until_it_is_so
from rollcast.consumer import Daemon, LocalDumpStore
from rollcast.consumer.errors import ConsumeConfigError
from rollcast.consumer.stats import MAX_RUNS
from rollcast.consumer.store import Dump, PublishedDump
from rollcast.schemas import DpShard, SamplePart, encode, record_key


async def get(daemon: Daemon, path: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{daemon.http_port}{path}") as response,
    ):
        return response.status, await response.text()


async def series_of(daemon: Daemon) -> dict[str, float]:
    status, text = await get(daemon, "/metrics")
    assert status == 200
    return {
        f"{sample.name}{sample.labels or ''}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@asynccontextmanager
async def served(installed: Installation, store: LocalDumpStore | None = None) -> AsyncIterator[Daemon]:
    async with running(replace(installed.config, http_port=0, stall_after_s=4.0), store) as daemon:
        yield daemon


async def until_ready(daemon: Daemon) -> None:
    async def ready() -> bool:
        return (await get(daemon, "/readyz"))[0] == 200

    await until_it_is_so(ready)


async def test_a_daemon_that_works_is_alive_and_ready_and_counts_what_it_does(installed: Installation) -> None:
    frames = frames_of("run", 1, 1, shards(1))
    async with served(installed) as daemon:
        await until_ready(daemon)
        assert await get(daemon, "/healthz") == (200, "ok\n")
        before = await series_of(daemon)
        await installed.send([*keyed("run", 1, frames), (b"x", b"garbage")])
        await installed.dumps(1)
        await until(lambda: daemon.stats.dumps == 1)
        after = await series_of(daemon)

    for name in ("dumps_total", "retries_total", "gaps_total", "client_rebuilds_total", "lost_dead_letters_total"):
        assert before[f"rollcast_{name}"] == 0
    assert before["rollcast_dead_letters_total{'reason': 'decode'}"] == 0
    assert after["rollcast_dead_letters_total{'reason': 'decode'}"] == 1
    assert after["rollcast_records_total"] == len(frames) + 1
    assert after["rollcast_record_bytes_total"] == sum(map(len, frames)) + len(b"garbage")
    assert after["rollcast_dumps_total"] == after["rollcast_dump_seconds_count"] == 1
    assert after["rollcast_dump_seconds_sum"] > 0
    assert after["rollcast_open_rollouts"] == after["rollcast_degraded"] == 0
    assert after["rollcast_assigned_partitions"] == 2
    assert after["rollcast_seconds_since_progress"] < 20
    assert after["rollcast_unused_records_total{'reason': 'decode', 'run': ''}"] == 1
    assert after.keys() - before.keys() == {"rollcast_unused_records_total{'reason': 'decode', 'run': ''}"}


async def test_runs_are_told_apart_only_so_far(installed: Installation) -> None:
    part = next(event for event in events_of("run", 1, 1, shards(1)) if isinstance(event, SamplePart))
    runs = [f"run-{number}" for number in range(2 * MAX_RUNS)]
    async with served(installed) as daemon:
        # Twice the same: the second one is a duplicate.
        await installed.send((record_key(run, 1), encode(replace(part, run_id=run))) for run in runs for _ in range(2))
        await until(lambda: daemon.stats.duplicates == len(runs))
        unused = {name: value for name, value in (await series_of(daemon)).items() if "unused_records" in name}

    assert len(unused) == MAX_RUNS + 1
    assert sum(unused.values()) == len(runs)


async def test_what_was_written_as_incomplete_and_came_late_takes_no_scratch_space(installed: Installation) -> None:
    *most, last = keyed("run", 1, frames_of("run", 1, 1, shards(1)))
    config = replace(installed.config, http_port=0, incomplete_after_s=1.0)
    async with running(config) as daemon:
        await installed.send(most)
        await until(lambda: daemon.stats.incomplete_dumps == 1)
        assert (await series_of(daemon))["rollcast_scratch_bytes"] > 0
        await installed.send([last])
        await until(lambda: daemon.stats.dumps == 1)

        async def nothing_is_taken() -> bool:
            return (await series_of(daemon))["rollcast_scratch_bytes"] == 0

        await until_it_is_so(nothing_is_taken)


async def test_a_thousand_short_runs_add_no_series(installed: Installation) -> None:
    shard = next(event for event in events_of("run", 1, 1, shards(1)) if isinstance(event, DpShard))
    dropped = replace(shard, dropped_reason="spool full", slot_digests=(), part_counts=())
    async with served(installed) as daemon:
        before = await series_of(daemon)
        runs = [f"run-{number}" for number in range(1000)]
        await installed.send((record_key(run, 1), encode(replace(dropped, run_id=run))) for run in runs)
        await until(lambda: daemon.stats.dropped == len(runs))
        after = await series_of(daemon)

    assert after["rollcast_dropped_total"] == len(runs)
    assert after.keys() == before.keys()


async def test_open_rollouts_and_their_age_are_shown(installed: Installation) -> None:
    *most, _ = frames_of("run", 1, 1, shards(1))
    async with served(installed) as daemon:
        await installed.send(keyed("run", 1, most))
        await until(lambda: daemon.stats.records == len(most))
        async with asyncio.timeout(20):
            while not (shown := await series_of(daemon))["rollcast_oldest_open_seconds"]:  # noqa: ASYNC110  # a scrape
                await asyncio.sleep(0.1)

    assert shown["rollcast_open_rollouts"] == 1
    assert 0 < shown["rollcast_oldest_open_seconds"] < 20
    assert shown["rollcast_resident_bytes"] > 0


class FullStore(LocalDumpStore):
    """A store whose disk is full until `full` is taken away."""

    full = True

    def publish(self, dump: Dump) -> PublishedDump:
        if self.full:
            raise OSError(28, "No space left on device")
        return super().publish(dump)


async def test_a_full_disk_is_not_ready_and_still_alive_until_there_is_room(installed: Installation) -> None:
    store = FullStore(installed.config.dump_path)
    async with served(installed, store) as daemon:
        await until_ready(daemon)
        await installed.send(keyed("run", 1, frames_of("run", 1, 1, shards(1))))
        await until(lambda: daemon.stats.retries >= 1)
        status, text = await get(daemon, "/readyz")
        assert status == 503
        assert "it could not write the dump of run 'run' attempt 1 rollout 1" in text
        assert "No space left on device" in text
        assert (await get(daemon, "/healthz"))[0] == 200
        assert (await series_of(daemon))["rollcast_degraded"] == 1
        store.full = False
        await until_ready(daemon)
        assert (await series_of(daemon))["rollcast_degraded"] == 0


async def test_a_dump_with_a_folder_at_its_name_holds_up_no_other_and_is_written_when_that_is_gone(
    installed: Installation,
) -> None:
    in_the_way = installed.folder / "run" / "1.pt"
    in_the_way.mkdir(parents=True)
    others = [("run", 2), ("run", 3), ("other", 1)]
    async with served(installed) as daemon:
        await installed.send(keyed("run", 1, frames_of("run", 1, 1, shards(1))))
        await until(lambda: daemon.stats.retries >= 1)
        for run_id, rollout_id in others:
            await installed.send(keyed(run_id, rollout_id, frames_of(run_id, 1, rollout_id, shards(rollout_id))))
        await installed.dumps(len(others))
        await until(lambda: daemon.stats.dumps == len(others))
        status, text = await get(daemon, "/readyz")
        shown = await series_of(daemon)
        committed = await installed.committed()
        assert list((installed.folder / "run").glob(".*.tmp")) == []
        in_the_way.rmdir()
        await installed.dumps(len(others) + 1)
        await until_ready(daemon)
        after = await series_of(daemon)

    assert status == 503
    assert "it could not write the dump of run 'run' attempt 1 rollout 1: [Errno 21]" in text
    assert shown["rollcast_waiting_dumps{'cause': 'name'}"] == shown["rollcast_degraded"] == 1
    assert shown["rollcast_waiting_dumps{'cause': 'disk'}"] == 0
    assert after["rollcast_waiting_dumps{'cause': 'name'}"] == after["rollcast_degraded"] == 0
    assert 0 in [committed.get(partition, 0) for partition in range(2)]
    for run_id, rollout_id in [("run", 1), *others]:
        installed.check(run_id, rollout_id, shards(rollout_id))


async def test_a_folder_at_the_name_of_a_manifest_costs_that_rollout_alone(installed: Installation) -> None:
    (installed.folder / "run" / "1.pt.manifest.json").mkdir(parents=True)
    async with served(installed) as daemon:
        await installed.send(keyed("run", 1, frames_of("run", 1, 1, shards(1))))
        await installed.send(keyed("run", 2, frames_of("run", 1, 2, shards(2))))
        await installed.dumps(1)
        await until(lambda: daemon.stats.retries >= 1)

    installed.check("run", 2, shards(2))


async def test_a_daemon_that_still_looks_for_its_broker_is_alive_and_not_ready(tmp_path: Path) -> None:
    daemon = Daemon(replace(installation("127.0.0.1:9", tmp_path).config, http_port=0))
    running = asyncio.create_task(daemon.run())
    await until(lambda: daemon.http_port is not None)
    assert await get(daemon, "/readyz") == (503, "the group has not given it partitions yet\n")
    assert await get(daemon, "/healthz") == (200, "ok\n")
    daemon.shutdown()
    await running


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"garbage\r\n\r\n",
        b"\x16\x03\x01\x02",
        b"GET /metrics HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad\r\n\r\n",
    ],
)
async def test_what_is_no_http_leaves_no_traceback_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, request_bytes: bytes
) -> None:
    daemon = Daemon(replace(installation("127.0.0.1:9", tmp_path).config, http_port=0))
    running = asyncio.create_task(daemon.run())
    await until(lambda: daemon.http_port is not None)
    reader, writer = await asyncio.open_connection("127.0.0.1", daemon.http_port)
    writer.write(request_bytes)
    writer.write_eof()
    await reader.read()
    writer.close()
    assert (await get(daemon, "/healthz"))[0] == 200
    daemon.shutdown()
    await running

    assert [record for record in caplog.records if record.exc_info] == []
    assert "Traceback" not in caplog.text


async def test_a_port_that_is_taken_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConsumeConfigError, match=f"127.0.0.1:{port}.*--http-port"):
            await Daemon(replace(installation("127.0.0.1:9", tmp_path).config, http_port=port)).run()
