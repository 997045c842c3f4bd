"""Topic names, run ids, exports and the namespace layout."""

import subprocess
import sys
from pathlib import Path

import pytest

import rollcast.producer
import rollcast.schemas
from rollcast.consumer.streams import run_of_key
from rollcast.schemas import ContractError, Topics, file_name_for, record_key

_ROOT = Path(__file__).parents[2]


def test_topics_share_the_prefix() -> None:
    topics = Topics("team.a")
    assert [topics.records, topics.metrics, topics.dumps, topics.dead_letters] == [
        "team.a.records",
        "team.a.metrics",
        "team.a.dumps",
        "team.a.dead-letters",
    ]


@pytest.mark.parametrize("prefix", ["", "a b", "a/b", "x" * 201, "..", "u\u00fc"])
def test_a_prefix_that_kafka_refuses_is_refused_first(prefix: str) -> None:
    with pytest.raises(ContractError, match="prefix"):
        Topics(prefix)


def test_all_records_of_a_rollout_have_one_key() -> None:
    assert record_key("run", 12) == b"run/12"


@pytest.mark.parametrize(
    ("key", "run"),
    [
        (record_key("a/b", 12), "a/b"),
        (record_key("a\nb", 3, "policy-loss/2"), "a\nb"),
        (record_key("7", 7), "7"),
        (b"\xff/1", "\ufffd"),
        (b"", None),
        (b"run", None),
        (b"/1", None),
    ],
)
def test_the_run_is_read_from_the_key_of_a_record(key: bytes, run: str | None) -> None:
    assert run_of_key(key) == run


def test_run_ids_become_distinct_safe_file_names() -> None:
    ids = ["../../etc/x", "..%2F..%2Fetc%2Fx", "a/b", "a%2Fb", ".", "..", ".hidden", "a", "A", "\u00fc", "x" * 300]
    ids += ["x" * 299 + "y", " ", "a\nb", "\x00"]
    names = [file_name_for(run_id) for run_id in ids]
    assert len(set(names)) == len(ids)
    for name in names:
        assert "/" not in name
        assert not name.startswith(".")
        assert len(name.encode()) <= 120
        assert name.isprintable()


@pytest.mark.parametrize("run_id", ["", "x" * 1025, "\ud800"])
def test_a_run_id_that_records_cannot_carry_is_refused(run_id: str) -> None:
    with pytest.raises(ContractError, match="run id"):
        file_name_for(run_id)


def test_the_namespace_has_no_init_file() -> None:
    assert not list(_ROOT.glob("*/src/rollcast/__init__.py"))


def test_public_names_are_frozen_and_importable() -> None:
    assert rollcast.producer.__all__ == [
        "ProducerError",
        "PublishResult",
        "PublishStatus",
        "Publisher",
        "PublisherConfig",
        "PublisherStats",
        "ScheduleError",
        "all_gather_with_cp",
        "build_dp_schedule",
        "capture_log_probs",
        "compute_dynamic_global_batch_size",
        "drain_captured_log_probs",
        "enable_log_prob_capture",
        "first_fit_pack",
        "gather_and_reduce_log_dict",
        "get_logits_and_tokens_offset_with_cp",
        "get_sum_of_sample_mean",
        "maybe_capture_log_probs",
        "pack_step_into_mbs",
        "publish_policy_loss_call",
        "reduce_train_step_metrics",
        "restore_context_parallel_fields_to_cpu",
        "rollout_log_metric_contribution",
        "save_debug_train_data",
    ]
    for package in (rollcast.producer, rollcast.schemas):
        for name in package.__all__:
            assert getattr(package, name) is not None


@pytest.mark.parametrize("package", ["producer", "consumer", "schemas"])
def test_names_that_are_loaded_on_first_use_are_listed_before(package: str) -> None:
    program = f"import rollcast.{package} as it; assert {{*it.__all__}} <= {{*dir(it)}}; import sys; "
    program += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
