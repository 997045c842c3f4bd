"""Four ranks of a Megatron trainer, context parallel 2 and data parallel 2, publish one rollout.

Each rank gives what it holds: the samples of its data-parallel shard and, of the columns with a value for each response
token, the slices that context parallelism leaves to it. The README says how to run it.
"""

import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from rollcast.producer import Publisher, PublisherConfig, get_logits_and_tokens_offset_with_cp

PROMPT, RESPONSES = 6, [9, 14]  # lengths in tokens, of the two samples of each shard


def own_slices(responses: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns what this rank's model computes of whole responses: two slices of each, joined."""
    kept = []
    for response in responses:
        *_, slices = get_logits_and_tokens_offset_with_cp(PROMPT + len(response), len(response))
        kept.append(torch.cat([response[first - PROMPT : end - PROMPT] for first, end in slices]))
    return kept


dist.init_process_group("gloo")
parallel_state.initialize_model_parallel(context_parallel_size=2)
shard = parallel_state.get_data_parallel_rank()
publisher = Publisher(
    PublisherConfig(run_id="four-ranks", spool_dir="spool", bootstrap_servers=os.environ["ROLLCAST_BOOTSTRAP_SERVERS"])
)

torch.manual_seed(shard)  # the context-parallel peers of a shard have the same samples
log_probs = [-torch.rand(length) for length in RESPONSES]
rollout_data = {
    "tokens": [torch.randint(50_000, (PROMPT + length,)) for length in RESPONSES],
    "total_lengths": [PROMPT + length for length in RESPONSES],
    "response_lengths": RESPONSES,
    "rewards": [1.0, 0.0],
    "log_probs": own_slices(log_probs),
    "rollout_log_probs": own_slices([tensor.bfloat16().float() for tensor in log_probs]),
    "partition": [shard, shard + 2],  # places of the shard's samples among the four of the rollout
}
result = publisher.publish(0, rollout_data)
in_kafka = publisher.close(timeout_s=60)
# A context-parallel peer of a writer has nothing to deliver, so its `close` tells nothing.
is_writer = parallel_state.get_context_parallel_rank() == 0
delivered = f", in Kafka: {in_kafka}" if is_writer else ""
# In one piece with its end: all ranks write to one terminal.
print(f"rank {dist.get_rank()}: {result.status}{delivered}\n", end="", flush=True)
dist.destroy_process_group()
