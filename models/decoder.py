"""A dense decoder of the Llama shape in torch operators, on any device: Llama, SmolLM, Mistral, Qwen2, Qwen3.

It is the reference for the native CPU step and the model that runs on CUDA. Rows are packed [T, ...] without padding;
attention is `TorchAttention`'s. Equations: Touvron et al. 2023 (RMSNorm before each half, SwiGLU, RoPE, residuals).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from models.base import Batch
from models.config import ModelConfig
from models.rope import rope_tables
from models.torch_attention import TorchAttention

Fetch = Callable[[str], Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, computed in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate x [T, heads, dim] pairwise: (x[i], x[i + dim / 2]) by the angle of the row's position."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine), -1).to(x.dtype)


class Linear:
    """y = x W^T + b for x [T, in], the weight arranged once for its device.

    On the CPU oneDNN would repack a bfloat16 weight at each call (about half the time of a small layer), so it is
    packed here; elsewhere the plain weight serves.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.bias = bias
        available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        self.packed = available and weight.device.type == "cpu" and weight.dtype == torch.bfloat16
        self.weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if self.packed else weight.contiguous()
        )

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return]
        return functional.linear(x, self.weight, self.bias)


class Operators(NamedTuple):
    """The operators that sum over a row. All else in the decoder works on single numbers, whatever is beside them."""

    linear: Callable[[Tensor, Tensor | None], Callable[[Tensor], Tensor]] = Linear
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm


PLAIN = Operators()


class DecoderLayer:
    """One block: attention, then the gated MLP, each behind a norm and added to the residual."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        fetch: Fetch,
        optional: Callable[[str], Tensor | None],
        operators: Operators,
    ) -> None:
        self.config, self.index, self.norm = config, index, operators.rms_norm
        prefix = f"model.layers.{index}."
        self.input_norm = fetch(prefix + "input_layernorm.weight")
        self.post_norm = fetch(prefix + "post_attention_layernorm.weight")
        self.q_norm, self.k_norm = (optional(prefix + f"self_attn.{n}_norm.weight") for n in "qk")

        def fused(*names: str) -> Callable[[Tensor], Tensor]:
            biases = [optional(f"{prefix}{n}.bias") for n in names]
            bias = torch.cat([b for b in biases if b is not None]) if biases[0] is not None else None
            return operators.linear(torch.cat([fetch(f"{prefix}{n}.weight") for n in names]), bias)

        self.qkv = fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.output = fused("self_attn.o_proj")
        self.gate_up = fused("mlp.gate_proj", "mlp.up_proj")
        self.down = fused("mlp.down_proj")

    def __call__(self, x: Tensor, cosine: Tensor, sine: Tensor, attention: TorchAttention) -> Tensor:
        c, rows = self.config, x.shape[0]
        qkv = self.qkv(self.norm(x, self.input_norm, c.norm_eps)).view(rows, -1, c.head_dim)
        q, k, v = torch.split(qkv, [c.num_heads, c.num_kv_heads, c.num_kv_heads], 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.norm(q, self.q_norm, c.norm_eps), self.norm(k, self.k_norm, c.norm_eps)
        attended = attention.attend(self.index, rotate(q, cosine, sine), rotate(k, cosine, sine), v)
        x = x + self.output(attended.reshape(rows, -1))
        gate, up = self.gate_up(self.norm(x, self.post_norm, c.norm_eps)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class Decoder:
    """The whole model. `fetch` gives a tensor by its Hugging Face Llama name, on any device and in any dtype."""

    def __init__(
        self,
        config: ModelConfig,
        fetch: Fetch,
        names: set[str],
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_length: int,
        operators: Operators = PLAIN,
    ) -> None:
        def take(name: str) -> Tensor:
            return fetch(name).to(device=device, dtype=dtype)

        def optional(name: str) -> Tensor | None:
            return take(name) if name in names else None

        self.config, self.norm = config, operators.rms_norm
        self.embedding = take("model.embed_tokens.weight")
        self.layers = [DecoderLayer(config, i, take, optional, operators) for i in range(config.num_layers)]
        self.final_norm = take("model.norm.weight")
        self.head = operators.linear(self.embedding if config.tie_embeddings else take("lm_head.weight"), None)
        cosine, sine = rope_tables(config, max_length)
        self.cosine, self.sine = (torch.from_numpy(t).to(device)[:, None, :] for t in (cosine, sine))

    def hidden(self, batch: Batch, attention: TorchAttention) -> Tensor:
        """The residual stream after the last layer, [T, hidden]."""
        device = self.embedding.device
        positions = torch.from_numpy(batch.positions).to(device)
        cosine, sine = self.cosine[positions], self.sine[positions]
        attention.begin(batch)
        x = functional.embedding(torch.from_numpy(batch.token_ids).to(device), self.embedding)
        for layer in self.layers:
            x = layer(x, cosine, sine, attention)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [n, vocab] of rows [n, hidden]."""
        return self.head(self.norm(hidden, self.final_norm, self.config.norm_eps)).float()
