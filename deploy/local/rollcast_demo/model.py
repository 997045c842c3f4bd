"""A character-level causal language model of two layers, small enough to train on one CPU core."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from rollcast_demo import task

CONTEXT_LENGTH = 64


class _Block(nn.Module):
    """One pre-norm layer of causal attention and a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self._attention_norm = nn.LayerNorm(width)
        self._query_key_value = nn.Linear(width, 3 * width)
        self._attention_out = nn.Linear(width, width)
        self._feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        projected = self._query_key_value(self._attention_norm(hidden))
        query, key, value = projected.view(batch, length, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self._attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        fed: Tensor = self._feed_forward(hidden)
        return hidden + fed


class TinyLanguageModel(nn.Module):
    """Maps token ids `[batch, length]` to logits `[batch, length, vocabulary]`; padding stands on the right.

    Args:
        width: Size of the hidden state.
        heads: Attention heads per layer.
        layers: Number of layers.
    """

    def __init__(self, *, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self._token = nn.Embedding(task.VOCABULARY_SIZE, width)
        self._position = nn.Embedding(CONTEXT_LENGTH, width)
        self._blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self._norm = nn.LayerNorm(width)
        self._head = nn.Linear(width, task.VOCABULARY_SIZE)

    def forward(self, token_ids: Tensor) -> Tensor:
        positions = torch.arange(token_ids.shape[1])
        hidden = self._token(token_ids) + self._position(positions)
        logits: Tensor = self._head(self._norm(self._blocks(hidden)))
        return logits
