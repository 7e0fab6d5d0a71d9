"""What a GGUF file's metadata means: a ModelConfig, and Hugging Face's name for each tensor.

Owner: whoever opens the file. Knows llama.cpp's keys and names; touches no tensor data.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.config import END_TOKENS, ModelConfig, RopeConfig
from models.errors import CorruptModelError, UnsupportedModelError
from models.loading.layout import MAX_LAYERS, check_numbers

ARCHITECTURES = ("llama", "qwen2", "qwen3")
INTERLEAVED_ROPE = ("llama",)  # architectures whose q and k rows the file holds in interleaved rotary order
ROPE_DIVISORS = "rope_freqs.weight"  # [head_dim / 2] what to divide each rotary frequency by (Llama 3.1 and later)
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


class _Metadata:
    """A file's metadata. `{arch}` in a key stands for the architecture's name; a wrong type is CorruptModelError."""

    def __init__(self, path: Path, values: Mapping[str, Any], architecture: str) -> None:
        self.path = path
        self._values = values
        self._architecture = architecture

    def get(self, key: str) -> Any:
        return self._values.get(self.full(key))

    def full(self, key: str) -> str:
        return key.format(arch=self._architecture)

    def real(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None:
            value = default
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise CorruptModelError(f"{self.path}: {self.full(key)} is missing from its metadata or is not a number.")
        return float(value)

    def whole(self, key: str, default: int | None = None) -> int:
        return int(self.real(key, default))


def read_config(
    path: Path, values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], divisors: tuple[float, ...] = ()
) -> ModelConfig:
    """`shapes` are by canonical name; `divisors` is the content of ROPE_DIVISORS when the file has it.

    Raises UnsupportedModelError and CorruptModelError.
    """
    architecture = values.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path} holds a model of architecture {architecture!r}; supported are {', '.join(ARCHITECTURES)}."
        )
    metadata = _Metadata(path, values, architecture)
    num_heads, hidden_size = metadata.whole("{arch}.attention.head_count"), metadata.whole("{arch}.embedding_length")
    num_layers = metadata.whole("{arch}.block_count")
    window = metadata.whole("{arch}.attention.sliding_window", 0) or None
    config = ModelConfig(
        architecture=architecture,
        vocab_size=shapes.get("model.embed_tokens.weight", (0,))[0],
        hidden_size=hidden_size,
        intermediate_size=metadata.whole("{arch}.feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=metadata.whole("{arch}.attention.head_count_kv", num_heads),
        head_dim=metadata.whole("{arch}.attention.key_length", hidden_size // (num_heads or 1)),
        max_position=metadata.whole("{arch}.context_length"),
        norm_eps=metadata.real("{arch}.attention.layer_norm_rms_epsilon"),
        rope=_rope(metadata, divisors),
        tie_embeddings="lm_head.weight" not in shapes,
        qkv_bias="model.layers.0.self_attn.q_proj.bias" in shapes,
        output_bias="model.layers.0.self_attn.o_proj.bias" in shapes,
        mlp_bias="model.layers.0.mlp.up_proj.bias" in shapes,
        qk_norm="model.layers.0.self_attn.q_norm.weight" in shapes,
        windows=(window,) * min(num_layers, MAX_LAYERS),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_end_tokens(metadata),
    )
    check_numbers(str(path), config)
    _refuse_what_is_not_read(metadata, config)
    return config


def _refuse_what_is_not_read(metadata: _Metadata, config: ModelConfig) -> None:
    if metadata.whole("split.count", 0) > 1:
        raise UnsupportedModelError(
            f"{metadata.path} is one part of a split model; merge its parts with llama-gguf-split first."
        )
    if metadata.whole("{arch}.expert_count", 0):
        raise UnsupportedModelError(f"{metadata.path} holds a mixture of experts; dense models are supported.")
    for key in ("{arch}.attention.value_length", "{arch}.rope.dimension_count"):
        if metadata.whole(key, config.head_dim) != config.head_dim:
            raise UnsupportedModelError(
                f"{metadata.path}: {metadata.full(key)} differs from the size of a head, {config.head_dim}."
            )


def _rope(metadata: _Metadata, divisors: tuple[float, ...]) -> RopeConfig:
    """Rotary parameters under transformers' names, and "divided" for a file that lists divisors of its frequencies."""
    theta = metadata.real("{arch}.rope.freq_base", 10000.0)
    kind = metadata.get("{arch}.rope.scaling.type") or "none"
    parameters: dict[str, object] = {"rope_type": "default", "rope_theta": theta}
    if kind not in ("none", "linear", "yarn") or metadata.real("{arch}.rope.scaling.attn_factor", 1.0) != 1.0:
        raise UnsupportedModelError(f"{metadata.path}: rotary scaling {kind!r} of a GGUF file is not supported.")
    if divisors:
        parameters |= {"rope_type": "divided", "divisors": divisors}
    elif kind != "none":
        parameters |= {"rope_type": kind, "factor": metadata.real("{arch}.rope.scaling.factor")}
    if kind == "yarn":
        trained = metadata.whole("{arch}.rope.scaling.original_context_length", metadata.whole("{arch}.context_length"))
        parameters |= {
            "original_max_position_embeddings": trained,
            "beta_fast": metadata.real("{arch}.rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": metadata.real("{arch}.rope.scaling.yarn_beta_slow", 1.0),
        }
    return RopeConfig(theta, tuple(parameters.items()))


def _end_tokens(metadata: _Metadata) -> tuple[int, ...]:
    """Every token that ends a text or a turn, the file's own end token first.

    A file names one or two of them and leaves the rest to be known by their spelling.
    """
    ids = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    tokens, types = (metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if isinstance(tokens, list) and types is not None:
        spelled = [i for i, token in enumerate(tokens[: len(types)]) if token in END_TOKENS and types[i] == CONTROL]
        ids += spelled
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int)))
