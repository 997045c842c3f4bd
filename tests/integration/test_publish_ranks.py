"""Publishing on real ranks: the same dump as the inline way, whatever the layout, and nobody ever waits in vain."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.publish_programs import publish_and_dump, publish_every_layout, several
from fixtures.ranks import Grid, run_ranks
from fixtures.rollouts import HELD_BY_NOBODY_BYTES, payload_in_spool, whole_shard
from rollcast.consumer.difference import differences
from rollcast.producer.spool.folder import SpoolFolder
from rollcast.producer.spool.read import read_bundle
from rollcast.schemas import build_dump_payload

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def two_by_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    return folder, run_ranks(Grid(world=4, context=2), several, folder)


def _direct(rollout_id: int, data_parallel_size: int, writer_ranks: list[int]) -> dict[str, Any]:
    shards = [
        {"rank": rank, "data_parallel_rank": index, "rollout_data": whole_shard(rollout_id, index, data_parallel_size)}
        for index, rank in enumerate(writer_ranks)
    ]
    return build_dump_payload(shards, rollout_id=rollout_id, writer_rank=min(writer_ranks))


def _assert_spool_and_inline_equal_direct(folder: Path, writer_ranks: list[int]) -> None:
    for rollout_id in (0, 1):
        direct = _direct(rollout_id, len(writer_ranks), writer_ranks)
        assert not differences(payload_in_spool(folder / "spool", rollout_id), direct)
        inline = torch.load(folder / "inline" / f"{rollout_id}.pt", weights_only=True)
        assert not differences(inline, direct)


@pytest.mark.parametrize("restore", ["in_place", "gather"])
def test_cp2_dp2_restores_every_field_bit_equal(two_by_two: tuple[Path, list[dict[str, Any]]], restore: str) -> None:
    folder, results = two_by_two
    _assert_spool_and_inline_equal_direct(folder / restore, [0, 2])
    ranks = [result[restore] for result in results]
    assert [rank["writer"] for rank in ranks] == [True, False, True, False]
    assert all(rank["statuses"] == ["published", "published"] for rank in ranks)


def test_in_place_peers_share_the_copying(two_by_two: tuple[Path, list[dict[str, Any]]]) -> None:
    ranks = [result["in_place"] for result in two_by_two[1]]
    for first, second in (ranks[:2], ranks[2:]):
        for copied, other, raw in zip(first["copied"], second["copied"], first["raw"], strict=True):
            assert copied + other == raw - HELD_BY_NOBODY_BYTES
            assert min(copied, other) > 0.3 * raw


@pytest.mark.parametrize("context", [1, 2, 4])
def test_every_layout_and_restore_gives_the_same_bundle(tmp_path: Path, context: int) -> None:
    run_ranks(Grid(world=4, context=context), publish_every_layout, tmp_path)
    writers = list(range(0, 4, context))
    direct = _direct(0, len(writers), writers)
    folders = list(tmp_path.iterdir())
    assert len(folders) == 6
    for folder in folders:
        assert not differences(payload_in_spool(folder / "spool", 0), direct), folder.name


@pytest.mark.parametrize(
    ("grid", "shards"),
    [
        (Grid(world=8, tensor=2, pipeline=2, context=2), 1),
        (Grid(world=8, pipeline=2, context=2), 2),
        (Grid(world=8, pipeline=2, context=2, virtual=2), 2),
    ],
    ids=["tp2 pp2 cp2", "pp2 cp2 dp2", "pp2 cp2 dp2, virtual stages"],
)
def test_each_shard_has_one_writer_on_the_last_stage(tmp_path: Path, grid: Grid, shards: int) -> None:
    results = run_ranks(grid, publish_and_dump, tmp_path, "auto", 2**20)
    writers = [rank for rank, result in enumerate(results) if result["writer"]]
    assert len(writers) == shards
    assert sum(result["takes_part"] for result in results) == shards * grid.context
    assert min(writers) >= grid.world // grid.pipeline
    _assert_spool_and_inline_equal_direct(tmp_path, writers)


def test_one_broken_rank_drops_the_rollout_on_all_with_the_same_reason_and_hangs_nobody(
    two_by_two: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, results = two_by_two
    broken = [result["broken"] for result in results]
    assert max(rank["slowest_s"] for rank in broken) < 20
    for rank in broken:
        statuses = [status for status, _ in rank["outcomes"]]
        assert statuses == ["published", "dropped", "published", "dropped", "published"]
        assert "rank 3" in rank["outcomes"][1][1]
        assert "published or dropped before" in rank["outcomes"][3][1]
    assert "'log_probs' of sample 0" in broken[3]["outcomes"][1][1]
    reasons: dict[int, list[str | None]] = {0: [], 1: [], 2: [], 3: []}
    for name, path in SpoolFolder(folder / "broken" / "spool").bundles():
        reasons[name.rollout_id].append(read_bundle(path).shard.dropped_reason)
    assert reasons[0] == reasons[2] == reasons[3] == [None, None]
    assert len(reasons[1]) == 2
    assert all(reason and "rank 3" in reason for reason in reasons[1])


def test_a_peer_that_cannot_copy_costs_its_shard_of_one_rollout_and_its_writer_says_so_at_once(
    two_by_two: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, results = two_by_two
    statuses, drops = zip(*(result["peer"] for result in results), strict=True)
    assert [*statuses] == [["published"] * 2, ["dropped", "published"], ["published"] * 2, ["published"] * 2]
    assert [*drops] == [{"not_copied": 1}, {}, {}, {}]
    reasons = [read_bundle(path).shard.dropped_reason for _, path in SpoolFolder(folder / "peer" / "spool").bundles()]
    assert reasons[1:] == [None] * 3
    assert reasons[0] is not None
    assert "rank 1 could not copy its records: ValueError('a tensor does not hold what was planned" in reasons[0]


def test_a_writer_that_cannot_take_what_a_peer_sends_leaves_nobody_sending(
    two_by_two: tuple[Path, list[dict[str, Any]]],
) -> None:
    _, results = two_by_two
    statuses, drops, seconds = zip(*(result["writer"] for result in results), strict=True)
    assert [*statuses] == [["dropped", "published"], *[["published"] * 2] * 3]
    assert [*drops] == [{"not_copied": 1}, {}, {}, {}]
    assert max(seconds) < 20


def test_a_spool_that_is_full_for_one_shard_drops_the_rollout_for_all(
    two_by_two: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, results = two_by_two
    assert [result["full"] for result in results] == [["dropped", "dropped"]] * 4
    bundles = [read_bundle(path) for _, path in SpoolFolder(folder / "full" / "spool").bundles()]
    assert len(bundles) == 4
    assert all(bundle.shard.dropped_reason and not bundle.slots for bundle in bundles)


def test_an_unusable_spool_on_one_rank_switches_publishing_off_and_training_goes_on(
    two_by_two: tuple[Path, list[dict[str, Any]]],
) -> None:
    assert [result["unusable"] for result in two_by_two[1]] == [["disabled", "False"]] * 4


def test_a_rank_that_is_off_says_so_and_costs_its_peers_nothing(
    two_by_two: tuple[Path, list[dict[str, Any]]],
) -> None:
    for statuses, seconds in (result["off"] for result in two_by_two[1]):
        assert statuses == ["disabled", "disabled"]
        assert seconds < 20


def test_the_quota_counts_a_shard_once_however_many_peers_fill_it(
    two_by_two: tuple[Path, list[dict[str, Any]]],
) -> None:
    statuses = [result["quota"] for result in two_by_two[1]]
    assert {status for status, _ in statuses} == {"published"}
    assert all(int(raw) > 7_500 for _, raw in statuses)


def test_nothing_unfinished_is_left_in_a_spool(two_by_two: tuple[Path, list[dict[str, Any]]]) -> None:
    assert not list(two_by_two[0].rglob("*.filling"))
