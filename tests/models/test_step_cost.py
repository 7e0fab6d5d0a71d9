"""What a step costs, against a model small enough to count."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from models.config import ModelConfig, RopeConfig
from models.plain_batch import plain_batch
from models.step_cost import StepCost, matrix_sizes

CONFIG = ModelConfig(
    "llama", vocab_size=100, hidden_size=8, intermediate_size=20, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=2, max_position=64, norm_eps=1e-5, rope=RopeConfig(1e4), tie_embeddings=True, windows=(None,) * 3,
)  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_are_counted_and_neither_norms_nor_biases(tied: bool) -> None:
    config = replace(CONFIG, tie_embeddings=tied, qkv_bias=True, qk_norm=True)
    q, k, v, o = 8 * 8, 4 * 8, 4 * 8, 8 * 8
    assert matrix_sizes(config) == (3 * (q + k + v + o + 3 * 8 * 20), 100 * 8)


def test_weights_are_read_once_a_step_and_the_context_once_a_sequence() -> None:
    cost = StepCost(layer_weights=10, head_weights=4, weight_bytes=1000, kv_bytes_per_token=8, attention_operations=6)
    assert cost.bytes_read(0) == 1000
    assert cost.bytes_read(5 * 16) == 1000 + 80 * 8
    assert cost.operations(rows=3, logit_rows=1, pairs=7) == 2 * (30 + 4) + 42


def test_a_batch_by_hand_says_where_each_row_belongs() -> None:
    tables = np.arange(6, dtype=np.int32).reshape(2, 3)
    batch = plain_batch(np.arange(5, dtype=np.int32), tables, starts=[4, 10], counts=[3, 2])
    assert batch.positions.tolist() == [4, 5, 6, 10, 11]
    assert batch.query_starts.tolist() == [0, 3, 5]
    assert batch.lengths.tolist() == [7, 12]
    assert batch.logit_rows.tolist() == [2, 4]
    assert batch.sampling.position.tolist() == [7, 12]
    assert all(
        array.dtype == np.int32 for array in (batch.positions, batch.query_starts, batch.lengths, batch.logit_rows)
    )
