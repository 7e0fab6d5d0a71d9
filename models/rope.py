"""Rotary position tables: the cosine and sine of every position, computed once in float32.

The frequencies of plain RoPE are theta^(-2i / dim) (Su et al. 2021); every scaled kind takes its frequencies and its
attention factor from transformers' own rope utilities.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from models.config import ModelConfig
from models.errors import UnsupportedModelError

F32 = npt.NDArray[np.float32]

# Kinds whose frequencies change with the length of the sequence would make a token's key depend on what follows it.
LENGTH_DEPENDENT = ("dynamic", "longrope")


def rope_tables(config: ModelConfig, length: int) -> tuple[F32, F32]:
    """Cosines and sines, each [length, head_dim / 2]. Raises UnsupportedModelError for a kind that cannot be served."""
    frequencies, factor = rope_frequencies(config)
    angles = np.arange(length, dtype=np.float32)[:, None] * frequencies[None, :]
    return (np.cos(angles) * np.float32(factor)).astype(np.float32), (np.sin(angles) * np.float32(factor)).astype(
        np.float32
    )


def rope_frequencies(config: ModelConfig) -> tuple[F32, float]:
    """Angle per position of each pair [head_dim / 2], and the factor on both tables (1 but for some scaled kinds)."""
    parameters = dict(config.rope.parameters)
    kind = str(parameters.get("rope_type", parameters.get("type", "default")))
    if kind in LENGTH_DEPENDENT:
        raise UnsupportedModelError(f"rope type {kind!r} depends on the sequence's length and is not supported")
    if kind in ("default", "divided"):
        exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
        plain = np.float32(1) / np.float32(config.rope.theta) ** exponents
        divisors = np.array(parameters["divisors"] if kind == "divided" else 1, np.float32)
        return (plain / divisors).astype(np.float32), 1.0
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        raise UnsupportedModelError(f"unknown rope type {kind!r}")
    shape = LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position,
        rope_parameters={"rope_theta": config.rope.theta, **parameters, "rope_type": kind},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](shape, torch.device("cpu"))
    return np.asarray(frequencies.float().numpy(), dtype=np.float32), float(factor)
