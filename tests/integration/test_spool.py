"""Bundles on a real file system: whole or not there at all."""

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from fixtures.publishers import direct_payload, spool_publisher, spool_session
from fixtures.rollouts import payload_in_spool, whole_shard
from rollcast.consumer.difference import differences
from rollcast.producer import PublisherConfig, PublishStatus
from rollcast.producer.committer import CommitJob, Committer
from rollcast.producer.errors import ProducerError, RolloutDataError, SpoolError
from rollcast.producer.parallel import ParallelLayout
from rollcast.producer.plan import make_plan
from rollcast.producer.spool.folder import BundleName, SpoolFolder
from rollcast.producer.spool.read import read_bundle
from rollcast.producer.spool.write import BundleWriter
from rollcast.producer.stats import Counters
from rollcast.schemas.tensors import UNSUPPORTED_KEY


def test_a_bundle_holds_the_shard_and_safetensors_opens_its_tensor_file(tmp_path: Path) -> None:
    publisher = spool_publisher(tmp_path)
    shard = whole_shard(0, 0, 1)
    result = publisher.publish(0, shard)
    publisher.close(0.2)
    assert result.status is PublishStatus.PUBLISHED
    assert result.copied_bytes == result.raw_bytes > 0
    assert not differences(payload_in_spool(tmp_path, 0), direct_payload(0))
    ((_, path),) = SpoolFolder(tmp_path).bundles()
    tensors = safetensors.torch.load_file(path / "tensors.safetensors")
    assert torch.equal(tensors["6.0.rollout_log_probs"], shard["rollout_log_probs"][6])
    assert sorted(file.name for file in path.iterdir()) == ["records.avro", "tensors.safetensors"]


def test_the_memory_may_be_reused_as_soon_as_publish_returns(tmp_path: Path) -> None:
    publisher = spool_publisher(tmp_path)
    shard = whole_shard(0, 0, 1)
    publisher.publish(0, shard)
    for tensor in shard["log_probs"]:
        tensor.fill_(float("nan"))
    publisher.close(0.2)
    assert not differences(payload_in_spool(tmp_path, 0), direct_payload(0))


@pytest.mark.parametrize("data", [{"response_lengths": []}, {"response_lengths": [], "tokens": [], "raw_reward": []}])
def test_an_empty_shard_is_a_bundle_too(tmp_path: Path, data: dict[str, Any]) -> None:
    publisher = spool_publisher(tmp_path, strict=True)
    publisher.publish(0, data)
    publisher.close(0.2)
    payload = payload_in_spool(tmp_path, 0)
    assert payload["samples"] == []


def _freed(view: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach, kept_bytes: int = 0) -> torch.Tensor:
    tensor = view(torch.arange(8, dtype=torch.float32))
    tensor.untyped_storage().resize_(kept_bytes)
    return tensor


def _every_second(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[::2]


@pytest.mark.parametrize("kept_bytes", [0, 24])
@pytest.mark.parametrize("view", [torch.Tensor.detach, _every_second, lambda tensor: tensor.view(2, 4).T])
def test_a_tensor_whose_memory_is_gone_drops_the_rollout_and_leaves_nothing(
    tmp_path: Path, kept_bytes: int, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    publisher = spool_publisher(tmp_path)
    result = publisher.publish(0, whole_shard(0, 0, 1) | {"extra": _freed(view, kept_bytes)})
    assert result.status is PublishStatus.DROPPED
    assert publisher.publish(1, whole_shard(1, 0, 1)).status is PublishStatus.PUBLISHED
    publisher.close(0.2)
    dropped, published = (read_bundle(path) for _, path in SpoolFolder(tmp_path).bundles())
    assert dropped.shard.dropped_reason is not None
    assert "could not copy its records" in dropped.shard.dropped_reason
    assert published.shard.dropped_reason is None
    assert not list(tmp_path.rglob("*.filling"))


def test_a_rollout_that_could_not_be_copied_keeps_no_memory(tmp_path: Path) -> None:
    publisher = spool_publisher(tmp_path)
    data = whole_shard(0, 0, 1)
    data["log_probs"][-1].untyped_storage().resize_(0)
    gc.disable()
    try:
        result = publisher.publish(0, data)
        maps = Path("/proc/self/maps").read_text()
    finally:
        gc.enable()
        publisher.close(0.1)
    assert result.status is PublishStatus.DROPPED
    assert f"{tmp_path}/run" not in maps


def test_a_record_of_one_rank_that_cannot_be_copied_leaves_nothing(tmp_path: Path) -> None:
    publisher = spool_publisher(tmp_path)
    result = publisher.publish_alone("policy-loss", lambda: {"response_lengths": [8], "values": [_freed()]})
    assert result.status is PublishStatus.DROPPED
    assert not list(tmp_path.rglob("*.filling"))
    publisher.close(0.2)
    assert publisher.stats.dropped["not_copied"] == 1


def test_a_record_of_one_rank_for_which_no_bundle_can_be_made_is_no_bad_data(tmp_path: Path) -> None:
    publisher = spool_publisher(tmp_path, attempt=1)
    (tmp_path / "run" / ".0-a1-loss0.filling").touch()
    result = publisher.publish_alone("policy-loss", lambda: {"response_lengths": [0]})
    publisher.close(0.2)
    assert result.status is PublishStatus.DROPPED
    assert {reason: count for reason, count in publisher.stats.dropped.items() if count} == {"not_created": 1}


def test_a_publisher_that_was_switched_off_lets_go_of_the_spool_when_it_is_closed(tmp_path: Path) -> None:
    publisher = spool_publisher(tmp_path / "spool")
    publisher.publish(0, whole_shard(0, 0, 1))
    moved = (tmp_path / "spool").rename(tmp_path / "moved")
    assert publisher.publish(1, whole_shard(1, 0, 1)).status is PublishStatus.DISABLED
    assert SpoolFolder(moved).has_trainers()
    assert not publisher.close(0.2)
    assert not SpoolFolder(moved).has_trainers()
    assert not publisher.close(0.2)


def test_misaligned_data_drops_the_rollout_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = spool_publisher(tmp_path)
    result = publisher.publish(0, {**whole_shard(0, 0, 1), "tokens": []})
    assert result.status is PublishStatus.DROPPED
    assert result.reason is not None
    assert "'tokens' has 0 entries for 7 samples" in result.reason
    assert "rollout 0 is dropped" in caplog.text
    assert publisher.publish(1, whole_shard(1, 0, 1)).status is PublishStatus.PUBLISHED
    publisher.close(0.2)
    dropped, published = (read_bundle(path) for _, path in SpoolFolder(tmp_path).bundles())
    assert dropped.shard.dropped_reason
    assert not dropped.slots
    assert published.shard.dropped_reason is None


def test_a_strict_publisher_raises(tmp_path: Path) -> None:
    publisher = spool_publisher(tmp_path, strict=True)
    with pytest.raises(RolloutDataError, match="'tokens'"):
        publisher.publish(0, {**whole_shard(0, 0, 1), "tokens": []})
    with pytest.raises(RolloutDataError, match="integer from 0"):
        publisher.publish(-1, whole_shard(0, 0, 1))
    publisher.close(0.2)


def test_a_value_that_cannot_be_carried_costs_itself_alone(tmp_path: Path) -> None:
    publisher = spool_publisher(tmp_path)
    shard = whole_shard(0, 0, 1) | {"callback": len, "odd": [1, object(), 2**64, 3, 4, 5, 6]}
    assert publisher.publish(0, shard).status is PublishStatus.PUBLISHED
    publisher.close(0.2)
    payload = payload_in_spool(tmp_path, 0)
    assert payload["samples"][0]["odd"] == 1
    ((_, path),) = SpoolFolder(tmp_path).bundles()
    assert read_bundle(path).shard.replaced_values == 3


def test_an_unusable_spool_switches_publishing_off_with_one_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    publisher = spool_publisher(tmp_path / "file" / "spool")
    result = publisher.publish(0, whole_shard(0, 0, 1))
    assert result.status is PublishStatus.DISABLED
    assert result.reason is not None
    assert "Not a directory" in result.reason
    assert "give a writable local folder" in result.reason
    assert len(caplog.records) == 1
    assert not publisher.close(0.2)


def test_a_peer_that_never_fills_its_part_makes_the_rollout_a_dropped_one(tmp_path: Path) -> None:
    session = spool_session(tmp_path, commit_timeout_s=0.2)
    plan = make_plan(whole_shard(0, 0, 1), ParallelLayout())
    name = BundleName(0, session.attempt, "dp0")
    session.start_bundle(name, plan).mark_filled(0)
    committer = Committer(session, Counters(), launcher=None)
    committer.submit(CommitJob(name=name, content=plan.records, shard=session.closing_event(0, plan), peers=2))
    assert committer.close(10)
    ((_, committed),) = session.spool.bundles()
    bundle = read_bundle(committed)
    assert not bundle.slots
    assert bundle.shard.dropped_reason is not None
    assert "did not fill its part" in bundle.shard.dropped_reason
    assert not list(tmp_path.rglob("*.filling"))


def test_a_bundle_that_was_removed_before_it_was_filled_is_not_waited_for(tmp_path: Path) -> None:
    session = spool_session(tmp_path, commit_timeout_s=1000)
    plan = make_plan(whole_shard(0, 0, 1), ParallelLayout())
    name = BundleName(0, session.attempt, "dp0")
    session.start_bundle(name, plan).discard()
    committer = Committer(session, Counters(), launcher=None)
    committer.submit(CommitJob(name=name, content=plan.records, shard=session.closing_event(0, plan), peers=2))
    assert committer.close(10)
    ((_, committed),) = session.spool.bundles()
    assert "was removed before it was filled" in (read_bundle(committed).shard.dropped_reason or "")


def test_who_fills_a_file_that_was_removed_does_not_pass_for_who_fills_the_one_in_its_place(tmp_path: Path) -> None:
    session = spool_session(tmp_path)
    plan = make_plan(whole_shard(0, 0, 1), ParallelLayout())
    name = BundleName(0, session.attempt, "dp0")
    first = session.start_bundle(name, plan)
    # A slower peer gives up an earlier try of the rollout, which one of them called by another number, and begins it.
    session.start_bundle(name, plan).discard()
    second = session.start_bundle(name, plan)
    with pytest.raises(SpoolError, match="was removed while it was filled"):
        first.mark_filled(0)
    second.mark_filled(1)
    assert [path.name for path in second.path.glob("filled.*")] == ["filled.1"]


class _NoNumber:
    def __index__(self) -> int:
        raise RuntimeError("what it waits for has failed")

    def __repr__(self) -> str:
        raise RuntimeError("what it waits for has failed")


@pytest.mark.parametrize(
    ("rollout_id", "shown"),
    [
        (True, "True"),
        (1.0, "1.0"),
        ("7", "'7'"),
        (None, "None"),
        (-1, "-1"),
        (2**63, "9223372036854775808"),
        (2**70, "1180591620717411303424"),
        (10**5_000, "of type int and cannot be shown"),
        ("x" * 10_000, "'xxxxxxxxxxxx...xxxxxxxxxxxxx'"),
        (_NoNumber(), "<_NoNumber instance at "),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, str) else "",
)
def test_a_rollout_id_that_is_no_number_drops_the_rollout_with_its_value_and_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rollout_id: Any, shown: str
) -> None:
    publisher = spool_publisher(tmp_path)
    result = publisher.publish(rollout_id, whole_shard(0, 0, 1))
    assert result.status is PublishStatus.DROPPED
    assert result.reason is not None
    assert f"rollout_id is {shown}" in result.reason
    assert result.reason.endswith("; it must be an integer from 0 to 2**63 - 1")
    assert f"a rollout is dropped: {result.reason}" in caplog.text
    publisher.publish(rollout_id, whole_shard(0, 0, 1))
    assert publisher.stats.dropped["bad_data"] == 2
    assert publisher.publish(0, whole_shard(0, 0, 1)).status is PublishStatus.PUBLISHED
    publisher.close(0.2)
    assert len(SpoolFolder(tmp_path).bundles()) == 1
    assert not list(tmp_path.rglob("*.marking"))


def test_a_forked_child_publishes_nothing(tmp_path: Path) -> None:
    publisher = spool_publisher(tmp_path)
    child = os.fork()
    if child == 0:
        disabled = publisher.publish(0, whole_shard(0, 0, 1)).status is PublishStatus.DISABLED
        os._exit(0 if disabled else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert publisher.publish(0, whole_shard(0, 0, 1)).status is PublishStatus.PUBLISHED
    publisher.close(0.2)


def test_a_value_with_very_many_items_costs_itself_alone(tmp_path: Path) -> None:
    publisher = spool_publisher(tmp_path)
    many = list(range(300_000))
    shard = {"response_lengths": [1, 1], "partition": [0, 1], "x": [many, 1], "mine": many}
    assert publisher.publish(0, shard).status is PublishStatus.PUBLISHED
    publisher.close(0.2)
    payload = payload_in_spool(tmp_path, 0)
    assert payload["samples"][0]["x"] == payload["dp_shards"][0]["mine"] == {UNSUPPORTED_KEY: "builtins.list"}
    assert payload["samples"][1]["x"] == 1


def test_a_shard_whose_closing_event_would_not_fit_is_dropped(tmp_path: Path) -> None:
    publisher = spool_publisher(tmp_path, max_part_bytes=16_384)
    result = publisher.publish(0, {"response_lengths": [1] * 1000})
    assert result.reason is not None
    assert "1000 samples" in result.reason
    publisher.close(0.2)


def test_a_new_attempt_is_above_any_in_the_spool(tmp_path: Path) -> None:
    future = 10**15
    first = spool_publisher(tmp_path, attempt=future)
    first.publish(0, whole_shard(0, 0, 1))
    first.close(0.2)
    second = spool_publisher(tmp_path)
    second.publish(0, whole_shard(0, 0, 1))
    second.close(0.2)
    assert [name.attempt for name, _ in SpoolFolder(tmp_path).bundles()] == [future, future + 1]


@pytest.mark.parametrize("garbage", [b"\xff\xfe", None])
def test_a_destination_that_is_none_hides_no_other_run(tmp_path: Path, garbage: bytes | None) -> None:
    spool = SpoolFolder(tmp_path)
    publisher = spool_publisher(tmp_path)
    publisher.publish(0, whole_shard(0, 0, 1))
    publisher.close(0.2)
    strange = tmp_path / "strange" / ".destination"
    strange.parent.mkdir()
    if garbage is None:
        strange.mkdir()
    else:
        strange.write_bytes(garbage)
    assert (
        len(
            spool.bundles(
                PublisherConfig(run_id="run", spool_dir=tmp_path, bootstrap_servers="127.0.0.1:1").destination
            )
        )
        == 1
    )


def test_leftovers_of_the_dead_are_swept_when_nobody_lives(tmp_path: Path) -> None:
    spool = SpoolFolder(tmp_path)
    plan = make_plan(whole_shard(0, 0, 1), ParallelLayout())
    session = spool_session(tmp_path)
    for run_id, name in (("other", "0-a1-dp0"), ("run", "3-a2-dp5")):
        parsed = BundleName.parse(name)
        assert parsed is not None
        BundleWriter(spool.filling(run_id, parsed), plan, session.files)
    with spool.register_trainer():
        spool_publisher(tmp_path).close(0.1)
        assert [path.parent.name for path in tmp_path.rglob("*.filling")] == ["other"]
    spool_publisher(tmp_path).close(0.1)
    assert not list(tmp_path.rglob("*.filling"))


@pytest.mark.parametrize("damage", ["records.avro", "tensors.safetensors"])
@pytest.mark.parametrize("how", ["cut", "gone", "garbage"])
def test_a_damaged_bundle_is_a_typed_error(tmp_path: Path, damage: str, how: str) -> None:
    publisher = spool_publisher(tmp_path)
    publisher.publish(0, whole_shard(0, 0, 1))
    publisher.close(0.2)
    ((_, path),) = SpoolFolder(tmp_path).bundles()
    file = path / damage
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:100] if how == "cut" else b"\xff" * 500)
    with pytest.raises(SpoolError, match=damage.split(".")[0] if how != "cut" else str(path.name)):
        read_bundle(path)


def test_no_flipped_bit_of_the_records_makes_another_bundle(tmp_path: Path) -> None:
    publisher = spool_publisher(tmp_path)
    publisher.publish(0, {"response_lengths": [3, 4], "rewards": [0.5, 1.5], "text": ["a", "b"], "partition": [0, 1]})
    publisher.close(0.2)
    ((_, path),) = SpoolFolder(tmp_path).bundles()
    file, whole = path / "records.avro", read_bundle(path)
    data = file.read_bytes()
    noticed = 0
    for place in range(len(data)):
        file.write_bytes(data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :])
        try:
            assert read_bundle(path) == whole
        except SpoolError:
            noticed += 1
    # The rest names what was in the file before there was a digest, and is read over.
    assert noticed > len(data) - 40


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_part_bytes": 10}, "max_part_bytes is 10"),
        ({"context_parallel_restore": "magic"}, "'magic'"),
        ({"attempt": -1}, "attempt is -1"),
        ({"context_parallel_layout": "spiral"}, "'spiral'; known are zigzag-thd"),
        ({"commit_timeout_s": 0}, "commit_timeout_s is 0"),
        ({"max_spool_bundles": 0}, "max_spool_bundles is 0"),
        ({"block_up_to_s": 31}, "block_up_to_s is 31; it must be from 0 to half of control_timeout_s, which is 60"),
        ({"block_up_to_s": -1}, "block_up_to_s is -1"),
        ({"fsync": "always"}, "fsync is 'always'; use none or background"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_name_and_value(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ProducerError, match=words):
        spool_publisher(tmp_path, **options)
