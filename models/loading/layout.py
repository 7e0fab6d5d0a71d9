"""Which tensors a model has: their canonical names and shapes, from its numbers alone.

The names are those of a Hugging Face Llama checkpoint, whatever the file they come from. Owner: whoever loads. Knows
nothing of files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from models.config import ModelConfig
from models.errors import CorruptModelError

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

MAX_LAYERS = 4096  # far above any real model: a larger number is damage, and too large to go on with

_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position",
)


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of the model, in the order of a forward pass. A linear's shape is [outputs, inputs]."""
    shapes: dict[str, Shape] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        shapes.update((f"model.layers.{layer}.{name}", shape) for name, shape in _layer_shapes(config))
    shapes[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "input_layernorm.weight", (hidden,)
    for projection, rows in (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)):
        yield f"self_attn.{projection}.weight", (rows, hidden)
        if config.qkv_bias:
            yield f"self_attn.{projection}.bias", (rows,)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
    yield "self_attn.o_proj.weight", (hidden, q_rows)
    if config.output_bias:
        yield "self_attn.o_proj.bias", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    for projection, rows, columns in (
        ("gate_proj", inner, hidden),
        ("up_proj", inner, hidden),
        ("down_proj", hidden, inner),
    ):
        yield f"mlp.{projection}.weight", (rows, columns)
        if config.mlp_bias:
            yield f"mlp.{projection}.bias", (rows,)


def check_numbers(where: str, config: ModelConfig) -> None:
    """Raise CorruptModelError when a configuration contradicts itself."""
    for name in _POSITIVE:
        value = getattr(config, name)
        if not isinstance(value, int) or value < 1:
            raise CorruptModelError(f"{where}: its configuration has {name} = {value!r}, not a positive whole number.")
    if config.num_layers > MAX_LAYERS:
        raise CorruptModelError(f"{where}: its configuration says {config.num_layers} layers.")
    if config.num_heads % config.num_kv_heads:
        raise CorruptModelError(
            f"{where}: {config.num_heads} attention heads cannot share {config.num_kv_heads} key-value heads evenly."
        )
    if config.head_dim % 2:
        raise CorruptModelError(f"{where}: rotary embeddings need heads of an even size, not {config.head_dim}.")


def check_tensors(where: str, found: Shapes, expected: Shapes) -> None:
    """Raise CorruptModelError unless the tensors found are exactly the ones expected."""
    missing = [name for name in expected if name not in found]
    if missing:
        raise CorruptModelError(f"{where}: tensor {missing[0]} is missing{_and_more(missing)}.")
    extra = [name for name in found if name not in expected]
    if extra:
        raise CorruptModelError(f"{where}: tensor {extra[0]} does not belong to this kind of model{_and_more(extra)}.")
    for name, shape in expected.items():
        if found[name] != shape:
            raise CorruptModelError(
                f"{where}: tensor {name} has shape {list(found[name])} where the configuration says {list(shape)}."
            )


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
