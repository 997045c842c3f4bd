"""Reports: means over rollouts or tokens that do not depend on how samples are spread over ranks and micro-batches."""

from rollcast.producer.reports.log_dict import gather_and_reduce_log_dict, rollout_log_metric_contribution
from rollcast.producer.reports.reducers import get_sum_of_sample_mean
from rollcast.producer.reports.train_step import reduce_train_step_metrics

__all__ = [
    "gather_and_reduce_log_dict",
    "get_sum_of_sample_mean",
    "reduce_train_step_metrics",
    "rollout_log_metric_contribution",
]
