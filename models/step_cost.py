"""What a step of a model has to read and to multiply, whoever computes it: the other half of a roofline.

Pure numbers, taken from a model's configuration and from how its weights are packed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.config import ModelConfig
from models.loading.layout import EMBEDDING, LM_HEAD, tensor_shapes

if TYPE_CHECKING:
    from models.cpu.runner import CpuRunner


@dataclass(frozen=True, slots=True)
class StepCost:
    """A multiplication and its addition are two operations. Norms, rotations and sampling are left out."""

    layer_weights: int  # numbers in the matrices that every token row is multiplied by
    head_weights: int  # and in the LM head, for rows whose logits are needed
    weight_bytes: int  # of both together, as they lie in memory
    kv_bytes_per_token: int  # keys and values of one token over all layers
    attention_operations: int  # of one row with one token that it attends to, over all layers

    def bytes_read(self, context_tokens: int) -> int:
        """By a step whose sequences hold so many tokens together. Every weight is read once, however many rows."""
        return self.weight_bytes + context_tokens * self.kv_bytes_per_token

    def operations(self, rows: int, logit_rows: int, pairs: int) -> int:
        """Of a step; `pairs` counts, for each row, the tokens it attends to."""
        products = 2 * (rows * self.layer_weights + logit_rows * self.head_weights)
        return products + pairs * self.attention_operations


def matrix_sizes(config: ModelConfig) -> tuple[int, int]:
    """Numbers in the layers' matrices, and in the LM head."""
    shapes = tensor_shapes(config)
    layers = sum(math.prod(shape) for name, shape in shapes.items() if name.endswith("_proj.weight"))
    return layers, math.prod(shapes.get(LM_HEAD) or shapes[EMBEDDING])


def step_cost(runner: CpuRunner) -> StepCost:
    """The cost of a loaded model's steps."""
    weights = runner.weights
    # Of an embedding that is not the LM head too, a row a token is read, which is nothing.
    unread = 0 if runner.config.tie_embeddings else weights.packings[EMBEDDING].nbytes
    return cost_of(runner.config, weights.nbytes - unread, runner.page_bytes(16) // 16)


def cost_of(config: ModelConfig, weight_bytes: int, kv_bytes_per_token: int) -> StepCost:
    """The cost of a model whose matrices take so many bytes."""
    layers, head = matrix_sizes(config)
    attention = 4 * config.num_layers * config.num_heads * config.head_dim
    return StepCost(layers, head, weight_bytes, kv_bytes_per_token, attention)
