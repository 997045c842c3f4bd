"""What a sample costs: the floating-point operations of its forward pass."""

from dataclasses import dataclass
from typing import Any

from rollcast.producer.schedule.settings import positive_setting, setting

_PER_MULTIPLY_ADD = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of a decoder-only transformer that decide its cost.

    Attributes:
        num_layers: transformer layers.
        hidden_size: width of the residual stream.
        query_width: attention heads times channels per head.
        key_width: query groups times channels per head; keys and values each.
        mlp_weights: weights of a layer's MLP, router included, that one token passes.
        vocab_size: width of the output layer.
    """

    num_layers: int
    hidden_size: int
    query_width: int
    key_width: int
    mlp_weights: int
    vocab_size: int

    def forward_flops(self, length: int) -> int:
        """Returns the floating-point operations of one forward pass over a sequence of `length` tokens.

        Counts the matrix products, two operations per multiply-add, as Narayanan et al., "Efficient Large-Scale
        Language Model Training on GPU Clusters Using Megatron-LM" (2021), appendix, does; but a token attends to
        itself and the tokens before it only, so the score and value products count `length * (length + 1) / 2` pairs.
        """
        projections = self.hidden_size * (2 * self.query_width + 2 * self.key_width)
        weights = self.num_layers * (projections + self.mlp_weights) + self.hidden_size * self.vocab_size
        pairs = length * (length + 1) // 2
        attention = self.num_layers * 2 * self.query_width * pairs
        return _PER_MULTIPLY_ADD * (length * weights + attention)


def read_model_shape(args: Any) -> ModelShape:
    """Returns the shape from Megatron's argument names.

    Needed are `num_layers`, `hidden_size`, `num_attention_heads`, `ffn_hidden_size` and `vocab_size`. As in Megatron,
    `kv_channels` is by default `hidden_size // num_attention_heads`, and every head has its own keys unless
    `num_query_groups` says otherwise; `swiglu` adds a third matrix to the MLP; with `num_experts`, a token passes a
    router and `moe_router_topk` (default 2) experts of `moe_ffn_hidden_size` (default `ffn_hidden_size`).

    Raises:
        ScheduleError: a needed size is absent, or one is no positive integer.
    """
    hidden_size = positive_setting(args, "hidden_size")
    heads = positive_setting(args, "num_attention_heads")
    channels = positive_setting(args, "kv_channels", default=max(1, hidden_size // heads))
    groups = positive_setting(args, "num_query_groups", default=heads)
    if setting(args, "group_query_attention") is False:
        # Megatron then leaves num_query_groups at 1 and ignores it.
        groups = heads
    return ModelShape(
        num_layers=positive_setting(args, "num_layers"),
        hidden_size=hidden_size,
        query_width=heads * channels,
        key_width=groups * channels,
        mlp_weights=_mlp_weights(args, hidden_size),
        vocab_size=positive_setting(args, "vocab_size"),
    )


def _mlp_weights(args: Any, hidden_size: int) -> int:
    width = positive_setting(args, "ffn_hidden_size")
    matrices = 3 if setting(args, "swiglu") else 2
    if not setting(args, "num_experts"):
        return matrices * hidden_size * width
    width = positive_setting(args, "moe_ffn_hidden_size", default=width)
    experts_per_token = positive_setting(args, "moe_router_topk", default=2)
    router = hidden_size * positive_setting(args, "num_experts")
    return router + experts_per_token * matrices * hidden_size * width
