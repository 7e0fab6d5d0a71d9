"""The decoder against transformers' own models, on small random weights in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.steps import Piece, step
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from models.build import build_runner
from models.loading.checkpoint import open_checkpoint
from models.loading.source import resolve_source

SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)),
    "llama with biases, tied": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    ),
    "llama 3 rope": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, rope_parameters={**LLAMA3, "original_max_position_embeddings": 64})
    ),
    "yarn": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=YARN)),
    "mistral with a window": lambda: MistralForCausalLM(MistralConfig(**SHAPE, head_dim=32, sliding_window=24)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, head_dim=16)),
    "qwen2 with a window on some layers": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=20, max_window_layers=1)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32)),
}


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    torch.manual_seed(0)
    reference = MODELS[request.param]().eval().float()
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            if "norm" in name or "bias" in name:  # as made, they are all ones or zeros and would hide a mistake
                weight.add_(torch.randn_like(weight) * 0.3)
    folder = tmp_path_factory.mktemp("model")
    reference.save_pretrained(folder)
    return reference, folder


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_logits_equal_those_of_transformers(model: tuple[Any, Path], backend: str) -> None:
    reference, folder = model
    tokens = np.random.default_rng(1).integers(0, SHAPE["vocab_size"], 100)
    with torch.no_grad():
        expected = reference(torch.from_numpy(tokens)[None]).logits[0].numpy()
    runner = build_runner(
        open_checkpoint(resolve_source(str(folder))),
        device="cpu",
        dtype="float32",
        quantization="none",
        kv_dtype="float32",
        attention_backend=backend,
        threads=2,
        max_model_len=256,
    )
    runner.allocate(32, 16)
    pages = [9, 3, 17, 20, 4, 5, 31]
    whole = runner.logits(step([Piece(tokens, pages)]))
    assert np.abs(whole - expected).max() < 1e-3
    pages = [8, 2, 16, 19, 6, 7, 30]
    parts = [runner.logits(step([Piece(tokens[a:b], pages, a)])) for a, b in ((0, 40), (40, 41), (41, 100))]
    assert np.abs(np.concatenate(parts) - expected).max() < 1e-3
