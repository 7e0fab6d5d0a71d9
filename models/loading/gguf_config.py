"""What a GGUF file's metadata means: a ModelConfig, and Hugging Face's name for each tensor.

Owner: whoever opens the file. Knows llama.cpp's keys and names; touches no tensor data.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from models.config import ModelConfig, RopeConfig
from models.errors import CorruptModelError, UnsupportedModelError
from models.loading.layout import check_numbers
from models.loading.special_tokens import END_TOKENS

ARCHITECTURES = ("llama", "qwen2", "qwen3")
INTERLEAVED_ROPE = ("llama",)  # architectures whose q and k rows the file holds in interleaved rotary order
ROPE_FACTORS = "rope_freqs.weight"  # [head_dim / 2] what to divide each rotary frequency by (Llama 3.1 and later)
CONTROL = 3  # the token type of control tokens

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def canonical_name(name: str) -> str:
    """Hugging Face's name for a tensor; the name itself when there is none."""
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{int(match[1])}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return _TOP_NAMES.get(name, name)


def read_config(
    path: Path, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rope_factors: tuple[float, ...] = ()
) -> ModelConfig:
    """`shapes` are by canonical name; `rope_factors` is the content of ROPE_FACTORS when the file has it.

    Raises UnsupportedModelError and CorruptModelError.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path} holds a model of architecture {architecture!r}; supported are {', '.join(ARCHITECTURES)}."
        )
    _refuse_what_is_not_read(path, architecture, metadata)

    def number(key: str, default: float | None = None) -> Any:
        value = metadata.get(f"{architecture}.{key}", default)
        if not isinstance(value, int | float):
            raise CorruptModelError(f"{path}: {architecture}.{key} is missing from its metadata or is not a number.")
        return value

    num_layers, num_heads, hidden_size = (
        number(key) for key in ("block_count", "attention.head_count", "embedding_length")
    )
    window = number("attention.sliding_window", 0) or None
    config = ModelConfig(
        architecture=architecture,
        vocab_size=shapes.get("model.embed_tokens.weight", (0,))[0],
        hidden_size=hidden_size,
        intermediate_size=number("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=number("attention.head_count_kv", num_heads),
        head_dim=number("attention.key_length", hidden_size // (num_heads or 1)),
        max_position=number("context_length"),
        norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope=_rope(path, architecture, metadata, rope_factors),
        tie_embeddings="lm_head.weight" not in shapes,
        qkv_bias="model.layers.0.self_attn.q_proj.bias" in shapes,
        output_bias="model.layers.0.self_attn.o_proj.bias" in shapes,
        mlp_bias="model.layers.0.mlp.up_proj.bias" in shapes,
        qk_norm="model.layers.0.self_attn.q_norm.weight" in shapes,
        windows=(window,) * num_layers,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_end_tokens(metadata),
    )
    check_numbers(str(path), config)
    return config


def _refuse_what_is_not_read(path: Path, architecture: str, metadata: Mapping[str, Any]) -> None:
    if metadata.get("split.count", 0) > 1:
        raise UnsupportedModelError(
            f"{path} is one part of a split model; merge its parts with llama-gguf-split first."
        )
    if metadata.get(f"{architecture}.expert_count", 0):
        raise UnsupportedModelError(f"{path} holds a mixture of experts; dense models are supported.")
    head_dim = metadata.get(f"{architecture}.attention.key_length") or (
        metadata.get(f"{architecture}.embedding_length", 0)
        // (metadata.get(f"{architecture}.attention.head_count") or 1)
    )
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.get(f"{architecture}.{key}", head_dim) != head_dim:
            raise UnsupportedModelError(f"{path}: {architecture}.{key} differs from the size of a head, {head_dim}.")


def _rope(path: Path, architecture: str, metadata: Mapping[str, Any], factors: tuple[float, ...]) -> RopeConfig:
    """Rotary parameters under transformers' names, and "divided" for a file that lists divisors of its frequencies."""
    theta = float(metadata.get(f"{architecture}.rope.freq_base", 10000.0))
    scaling = {
        key: metadata.get(f"{architecture}.rope.scaling.{key}")
        for key in ("type", "factor", "original_context_length", "attn_factor", "yarn_beta_fast", "yarn_beta_slow")
    }
    parameters: dict[str, object] = {"rope_type": "default", "rope_theta": theta}
    if scaling["attn_factor"] not in (None, 1.0) or scaling["type"] not in (None, "none", "linear", "yarn"):
        raise UnsupportedModelError(f"{path}: rotary scaling {scaling['type']!r} of a GGUF file is not supported.")
    if factors:
        parameters |= {"rope_type": "divided", "divisors": factors}
    elif scaling["type"] in ("linear", "yarn") and scaling["factor"]:
        parameters |= {"rope_type": scaling["type"], "factor": float(scaling["factor"])}
        if scaling["type"] == "yarn":
            names = {
                "original_context_length": "original_max_position_embeddings",
                "yarn_beta_fast": "beta_fast",
                "yarn_beta_slow": "beta_slow",
            }
            parameters |= {names[key]: scaling[key] for key in names if scaling[key] is not None}
            parameters.setdefault("original_max_position_embeddings", metadata[f"{architecture}.context_length"])
    return RopeConfig(theta, tuple(parameters.items()))


def _end_tokens(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Every token that ends a text or a turn, the file's own end token first.

    A file names one or two of them and leaves the rest to be known by their spelling.
    """
    ids = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    tokens: Collection[str] = metadata.get("tokenizer.ggml.tokens", ())
    types = metadata.get("tokenizer.ggml.token_type", ())
    spelled = [
        i for i, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind == CONTROL and token in END_TOKENS
    ]
    return tuple(dict.fromkeys(int(i) for i in (*ids, *spelled) if i is not None))
