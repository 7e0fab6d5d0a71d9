"""What a model is: the numbers that fix its shape and its arithmetic.

Owner: whoever loads a model; immutable afterwards. Knows nothing of files, devices or batches.
"""

from __future__ import annotations

from dataclasses import dataclass

# How the usual model families spell the end of a text or of a turn, for files that do not list all of theirs.
END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. `parameters` is transformers' `rope_parameters` mapping, with "rope_type" and
    "rope_theta" always there and lists as tuples, so that the frequency maths can be taken from its rope utilities.

    One type is ours: "divided" is plain frequencies, each divided by its number of `divisors` [head_dim / 2]. It is how
    GGUF files of Llama 3.1 and later write their scaling.
    """

    theta: float
    parameters: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a dense decoder of the Llama kind.

    Invariants: `num_heads % num_kv_heads == 0`; `len(windows) == num_layers`.
    """

    architecture: str  # transformers' model_type: "llama", "mistral", "qwen2", "qwen3", ...
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # longest context the weights were trained for, in tokens
    norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False  # bias on the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k before RoPE (Qwen3)
    windows: tuple[int | None, ...] = ()  # per layer: tokens a row attends to, itself included; None for all
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
