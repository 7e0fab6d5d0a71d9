"""What a Hugging Face folder's config.json means: a ModelConfig.

Owner: whoever opens the folder. Reads JSON only. A key that is absent has the default of transformers' own
configuration class, because saved configurations leave defaults out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.config import ModelConfig, RopeConfig
from models.errors import CorruptModelError, ModelNotFoundError, UnsupportedModelError
from models.loading.layout import MAX_LAYERS, check_numbers

# transformers' defaults where the architectures differ; None means "as many as heads" or "hidden size / heads"
_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "bos_token_id", "eos_token_id"),
)
_DEFAULTS = {
    "llama": (32000, 4096, 11008, 32, 32, None, None, 2048, 1, 2),
    "mistral": (32000, 4096, 14336, 32, 32, 8, None, 131072, 1, 2),
    "qwen2": (151936, 4096, 22016, 32, 32, 32, None, 32768, None, None),
    "qwen3": (151936, 4096, 22016, 32, 32, 32, 128, 32768, None, None),
}
_DEFAULT_WINDOW = 4096
_DEFAULT_WINDOW_LAYERS = 28
_DEFAULT_THETA = 10000.0


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelNotFoundError and CorruptModelError."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelNotFoundError(f"{path.parent} has no {path.name}: it is not a Hugging Face model folder.") from None
    except (ValueError, RecursionError):
        raise CorruptModelError(f"{path} is not valid JSON.") from None
    except OSError as error:
        raise ModelNotFoundError(f"{path} cannot be read: {error.strerror}.") from None
    if not isinstance(content, dict):
        raise CorruptModelError(f"{path} does not hold a JSON object.")
    return content


def read_folder_config(folder: Path) -> ModelConfig:
    """Raises ModelError."""
    stated = read_json(folder / "config.json")
    architecture = stated.get("model_type")
    if architecture not in _DEFAULTS:
        raise UnsupportedModelError(
            f"{folder} holds a model of type {architecture!r}; supported are {', '.join(_DEFAULTS)}."
        )
    _refuse_what_is_not_read(folder, stated)
    values: dict[str, Any] = dict(zip(_KEYS, _DEFAULTS[architecture], strict=True)) | stated
    num_heads, num_layers = values["num_attention_heads"], values["num_hidden_layers"]
    attention_bias = bool(values.get("attention_bias", False)) and architecture in ("llama", "qwen3")
    try:
        config = ModelConfig(
            architecture=architecture,
            vocab_size=values["vocab_size"],
            hidden_size=values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads if values["num_key_value_heads"] is None else values["num_key_value_heads"],
            head_dim=values["hidden_size"] // num_heads if values["head_dim"] is None else values["head_dim"],
            max_position=values["max_position_embeddings"],
            norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            rope=_rope(folder, values),
            tie_embeddings=bool(values.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or architecture == "qwen2",
            output_bias=attention_bias,
            mlp_bias=bool(values.get("mlp_bias", False)) and architecture == "llama",
            qk_norm=architecture == "qwen3",
            windows=_windows(architecture, values),
            bos_token_id=values["bos_token_id"],
            eos_token_ids=_end_tokens(folder, values["eos_token_id"]),
        )
    except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise CorruptModelError(f"{folder / 'config.json'} holds a value of the wrong type: {error}.") from None
    check_numbers(str(folder / "config.json"), config)
    return config


def _refuse_what_is_not_read(folder: Path, stated: Mapping[str, Any]) -> None:
    if stated.get("quantization_config"):
        method = stated["quantization_config"]
        method = method.get("quant_method", method) if isinstance(method, dict) else method
        raise UnsupportedModelError(
            f"{folder} holds weights quantised with {method}; use the original weights or a GGUF file of the model."
        )
    if stated.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModelError(f"{folder}: activation {stated['hidden_act']!r} is not supported, silu is.")


def _windows(architecture: str, values: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Per layer. Qwen's window is off unless asked for, and then applies from layer `max_window_layers` on."""
    num_layers: int = min(values["num_hidden_layers"], MAX_LAYERS)
    window = values.get("sliding_window", _DEFAULT_WINDOW)
    if architecture == "llama" or window is None:
        return (None,) * num_layers
    if architecture == "mistral":
        return (int(window),) * num_layers
    if not values.get("use_sliding_window", False):
        return (None,) * num_layers
    kinds = values.get("layer_types")
    if kinds is None:
        first = values.get("max_window_layers", _DEFAULT_WINDOW_LAYERS)
        return tuple(int(window) if layer >= first else None for layer in range(num_layers))
    if len(kinds) != num_layers:
        raise ValueError(f"{len(kinds)} layer_types for {num_layers} layers")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _rope(folder: Path, values: Mapping[str, Any]) -> RopeConfig:
    """Either style: `rope_parameters` with everything in it, or the older `rope_theta` beside `rope_scaling`."""
    parameters = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
    old_type = parameters.pop("type", "default")
    parameters.setdefault("rope_type", old_type)
    if parameters.get("rope_theta") is None:
        parameters["rope_theta"] = values.get("rope_theta") or _DEFAULT_THETA
    partial = parameters.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if any(isinstance(value, dict) for value in parameters.values()) or partial not in (None, 1, 1.0):
        raise UnsupportedModelError(f"{folder}: rotary embeddings that differ by layer or cover part of a head.")
    if parameters["rope_type"] in ("llama3", "yarn", "longrope"):
        if "original_max_position_embeddings" in values:
            parameters["original_max_position_embeddings"] = values["original_max_position_embeddings"]
        parameters.setdefault("original_max_position_embeddings", values["max_position_embeddings"])
    frozen = {key: tuple(value) if isinstance(value, list) else value for key, value in parameters.items()}
    return RopeConfig(float(parameters["rope_theta"]), tuple(frozen.items()))


def _end_tokens(folder: Path, stated: int | list[int] | None) -> tuple[int, ...]:
    """The end tokens of generation_config.json, which knows about ends of turns, before config.json's."""
    path = folder / "generation_config.json"
    generation = read_json(path).get("eos_token_id") if path.is_file() else None
    ids: list[int] = []
    for value in (generation, stated):
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(int(token) for token in ids))
