"""A spool in trouble under real ranks: whole rollouts or none, on all shards alike, and training goes on."""

import asyncio
from pathlib import Path

import pytest

from fixtures.faults import Pipeline, consuming
from fixtures.installation import installation, until
from fixtures.ranks import Grid, run_ranks
from fixtures.rollouts import whole_shard
from fixtures.spool_programs import (
    BROKER_IS_BACK,
    publish_strictly_with_a_peer_killed,
    publish_while_the_broker_is_away,
    publish_with_a_peer_killed,
)
from fixtures.topic import read_until, shards_in
from fixtures.waiting import wait_until
from rollcast.consumer.broker import JvmBroker
from rollcast.consumer.difference import differences
from rollcast.consumer.dump_file import load_dump
from rollcast.producer.spool.folder import SpoolFolder
from rollcast.producer.spool.read import read_bundle
from rollcast.schemas import SamplePart, build_dump_payload

pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize("grid", [Grid(world=2), Grid(world=4, context=2)], ids=["dp2", "cp2 dp2"])
async def test_a_spool_full_while_the_broker_is_away_drops_whole_rollouts_and_says_so_when_it_is_back(
    own_broker: JvmBroker, tmp_path: Path, grid: Grid
) -> None:
    pipe = Pipeline(
        installation=installation(own_broker.bootstrap_servers, tmp_path / "dumps"), spool=tmp_path / "spool"
    )
    topics = pipe.installation.topics
    own_broker.stop()
    ranks = asyncio.create_task(
        asyncio.to_thread(
            run_ranks, grid, publish_while_the_broker_is_away, tmp_path, own_broker.bootstrap_servers, topics.prefix
        )
    )
    await asyncio.to_thread(wait_until, lambda: ranks.done() or len(list(tmp_path.glob("full-*"))) == grid.world)
    await asyncio.to_thread(own_broker.start)
    (tmp_path / BROKER_IS_BACK).touch()
    results = await ranks
    for rank, result in enumerate(results):
        writes = rank % grid.context == 0
        assert result["statuses"] == ["published", "published", "dropped", "dropped", "published"]
        assert max(result["stall_s"]) < 20
        assert min(result["room_s"][2:4]) >= 0.5
        assert (result["published"], result["dropped"]) == ((3, 2) if writes else (0, 0))
        assert result["closed"] == (not writes), "a writer knows of the drops"
    events = await read_until(
        own_broker.bootstrap_servers,
        topics.records,
        lambda events: all(len(shards_in(events, rollout_id)) == 2 for rollout_id in range(5)),
    )
    async with consuming(pipe, 0, 1, 4) as daemon:
        await until(lambda: daemon.stats.dropped == 2)
    assert len(list(pipe.dump(0).parent.glob("*.pt"))) == daemon.stats.dumps == 3
    for rollout_id in (0, 1, 4):
        shards = [
            {
                "rank": shard * grid.context,
                "data_parallel_rank": shard,
                "rollout_data": whole_shard(rollout_id, shard, 2),
            }
            for shard in range(2)
        ]
        direct = build_dump_payload(shards, rollout_id=rollout_id, writer_rank=0)
        assert not differences(load_dump(pipe.dump(rollout_id)), direct)
    for rollout_id in (2, 3):
        assert {shard.data_parallel_rank for shard in shards_in(events, rollout_id)} == {0, 1}
        for shard in shards_in(events, rollout_id):
            assert shard.dropped_reason is not None
            assert shard.dropped_reason.startswith("rank 0 (shard 0): spool full")
    assert {event.rollout_id for event in events if isinstance(event, SamplePart)} == {0, 1, 4}


def test_a_peer_killed_while_it_copies_hangs_nobody_and_leaves_nothing(tmp_path: Path) -> None:
    results = run_ranks(
        Grid(world=4, context=2), publish_with_a_peer_killed, tmp_path, 3, "while it copies", killed={3}
    )
    for rank in (0, 1, 2):
        # Its vote is on its way meanwhile, and may have left.
        assert results[rank]["statuses"] in (["published", "disabled"], ["disabled", "disabled"])
        assert results[rank]["seconds"] < 20
    assert not list(tmp_path.rglob("*.filling"))
    assert {source for rollout_id, source in _reasons(tmp_path) if rollout_id == 0} == {"dp0", "dp1"}


def _reasons(folder: Path) -> dict[tuple[int, str], str | None]:
    bundles = SpoolFolder(folder / "spool").bundles()
    return {(name.rollout_id, name.source): read_bundle(path).shard.dropped_reason for name, path in bundles}


def test_a_peer_killed_after_the_agreement_costs_its_shard_of_one_rollout_and_hangs_nobody(tmp_path: Path) -> None:
    results = run_ranks(
        Grid(world=4, context=2), publish_with_a_peer_killed, tmp_path, 3, "when all have agreed", killed={3}
    )
    for rank in (0, 1, 2):
        assert results[rank]["statuses"] == ["published", "disabled"]
        assert results[rank]["seconds"] < 20
        assert results[rank]["dropped"] == (rank == 2)
    reasons = _reasons(tmp_path)
    assert reasons[0, "dp0"] is None
    assert "a context-parallel peer did not fill its part within 1 s" in (reasons[0, "dp1"] or "")
    for source in ("dp0", "dp1"):
        assert "a rank is gone" in (reasons[1, source] or ""), "who has met its absence says so"
    assert not list(tmp_path.rglob("*.filling"))


def test_a_peer_killed_while_it_sends_is_announced_by_the_writers_that_are_left(tmp_path: Path) -> None:
    results = run_ranks(Grid(world=4, context=2), publish_with_a_peer_killed, tmp_path, 3, "while it sends", killed={3})
    for rank in (0, 1, 2):
        assert results[rank]["statuses"] == ["disabled" if rank == 2 else "published", "disabled"]
        assert results[rank]["seconds"] < 20
    reasons = _reasons(tmp_path)
    assert reasons[0, "dp0"] is None
    assert "rank 3 does not send its records" in (reasons[0, "dp1"] or "")
    assert "a rank is gone" in (reasons[1, "dp0"] or "")
    assert (1, "dp1") not in reasons, "it was off by then"
    assert not list(tmp_path.rglob("*.filling"))


def test_a_strict_publisher_that_has_lost_its_peers_says_so_afterwards_too(tmp_path: Path) -> None:
    rank, _ = run_ranks(Grid(world=2), publish_strictly_with_a_peer_killed, tmp_path, 1, killed={1})
    assert (rank["status"], rank["dropped"], rank["closed"]) == ("disabled", 2, False)
    assert "ControlError" in rank["reason"]
