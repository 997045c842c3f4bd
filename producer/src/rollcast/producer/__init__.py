"""The training side: publishes rollouts through a spool and a shipper.

Names are loaded on first use, so that the shipper, which lives in this package, starts without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rollcast.producer.missing import sentence_of

if TYPE_CHECKING:
    from rollcast.producer.config import PublisherConfig
    from rollcast.producer.context_parallel import all_gather_with_cp, get_logits_and_tokens_offset_with_cp
    from rollcast.producer.errors import ProducerError
    from rollcast.producer.fields import restore_context_parallel_fields_to_cpu
    from rollcast.producer.inline import save_debug_train_data
    from rollcast.producer.log_prob_capture import (
        capture_log_probs,
        drain_captured_log_probs,
        enable_log_prob_capture,
        maybe_capture_log_probs,
    )
    from rollcast.producer.policy_loss import publish_policy_loss_call
    from rollcast.producer.publisher import Publisher
    from rollcast.producer.reports import (
        gather_and_reduce_log_dict,
        get_sum_of_sample_mean,
        reduce_train_step_metrics,
        rollout_log_metric_contribution,
    )
    from rollcast.producer.result import PublishResult, PublishStatus
    from rollcast.producer.schedule import (
        ScheduleError,
        build_dp_schedule,
        compute_dynamic_global_batch_size,
        first_fit_pack,
        pack_step_into_mbs,
    )
    from rollcast.producer.stats import PublisherStats

__all__ = [
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

_HOMES = {
    "ProducerError": "errors",
    "PublishResult": "result",
    "PublishStatus": "result",
    "Publisher": "publisher",
    "PublisherConfig": "config",
    "PublisherStats": "stats",
    "ScheduleError": "schedule",
    "all_gather_with_cp": "context_parallel",
    "build_dp_schedule": "schedule",
    "capture_log_probs": "log_prob_capture",
    "compute_dynamic_global_batch_size": "schedule",
    "drain_captured_log_probs": "log_prob_capture",
    "enable_log_prob_capture": "log_prob_capture",
    "first_fit_pack": "schedule",
    "gather_and_reduce_log_dict": "reports",
    "get_logits_and_tokens_offset_with_cp": "context_parallel",
    "get_sum_of_sample_mean": "reports",
    "maybe_capture_log_probs": "log_prob_capture",
    "pack_step_into_mbs": "schedule",
    "publish_policy_loss_call": "policy_loss",
    "reduce_train_step_metrics": "reports",
    "restore_context_parallel_fields_to_cpu": "fields",
    "rollout_log_metric_contribution": "reports",
    "save_debug_train_data": "inline",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = import_module(f"{__name__}.{_HOMES[name]}")
    except ModuleNotFoundError as exc:
        if (sentence := sentence_of(exc, __name__)) is None:
            raise
        raise ModuleNotFoundError(sentence, name=exc.name) from None
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
