"""A checkpoint's matrices packed for the CPU kernels, and the C structures that point at them.

Owner: the runner. Knows names and formats, not what is done with a matrix.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch

from models.config import ModelConfig
from models.cpu import library as lib
from models.cpu.memory import Arena, aligned
from models.errors import KernelError
from models.loading.checkpoint import Checkpoint

WeightFormat = Literal["stored", "float32", "bfloat16", "int8", "int4"]

FOUR_BIT_KINDS = ("Q4_0", "Q4_1", "Q4_K")


class PackedWeights:
    """Every matrix and vector of a model in the kernels' own layout.

    `model` and `layers` are the C structures; this object keeps the memory behind them alive. `stored` serves a GGUF
    file's own quantisation and makes plain floats bfloat16.
    """

    def __init__(self, checkpoint: Checkpoint, weights: WeightFormat, engine: int) -> None:
        self.library, self.engine = lib.load_library(), engine
        self.checkpoint, self.weights, self.names = checkpoint, weights, set(checkpoint.names())
        self.config = checkpoint.config
        check_shape(self.config)
        self.kept: list[Any] = []
        sizes = [self.packed_size(name) for name in self.names if self.is_matrix(name)]
        self.arena = Arena(sum(sizes))
        self.nbytes = sum(sizes)
        self.layers = (lib.Layer * self.config.num_layers)()
        for index, layer in enumerate(self.layers):
            self.fill_layer(layer, index)
        self.embedding = self.matrix("model.embed_tokens")
        self.head = self.embedding if self.config.tie_embeddings else self.matrix("lm_head")
        self.final_norm = self.vector("model.norm.weight")

    def is_matrix(self, name: str) -> bool:
        return name.endswith(("_proj.weight", "embed_tokens.weight", "lm_head.weight"))

    def format(self, name: str) -> int:
        """The kernels' format for a matrix."""
        kind = self.checkpoint.stored_kind(name)
        quantised = kind not in ("F32", "F16", "BF16")
        chosen = {"float32": lib.F32, "bfloat16": lib.BF16, "int8": lib.W8, "int4": lib.W4}.get(self.weights)
        if self.weights == "int4" and name.endswith(("embed_tokens.weight", "lm_head.weight")):
            return lib.W8  # four bits cost the vocabulary's rows more than they save
        if chosen is not None:
            return chosen
        if not quantised:
            return lib.BF16
        return lib.W4 if kind in FOUR_BIT_KINDS else lib.W8

    def shape(self, name: str) -> tuple[int, int]:
        c = self.config
        heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        part = name.removesuffix(".weight").rsplit(".", 1)[-1]
        shapes = {"q_proj": (heads, c.hidden_size), "k_proj": (kv, c.hidden_size), "v_proj": (kv, c.hidden_size)}
        shapes |= {"o_proj": (c.hidden_size, heads), "down_proj": (c.hidden_size, c.intermediate_size)}
        shapes |= dict.fromkeys(("gate_proj", "up_proj"), (c.intermediate_size, c.hidden_size))
        return shapes.get(part, (c.vocab_size, c.hidden_size))

    def packed_size(self, name: str) -> int:
        outs, ins = self.shape(name)
        return aligned(self.library.octavo_packed_bytes(self.format(name), outs, ins))

    def matrix(self, prefix: str) -> lib.Matrix:
        """Pack one matrix, with its bias if there is one."""
        name = prefix + ".weight"
        (outs, ins), target = self.shape(name), self.format(name)
        stored = self.checkpoint.quantized(name)
        if (
            stored is not None
            and target in (lib.W8, lib.W4)
            and not (target == lib.W4 and stored.kind not in FOUR_BIT_KINDS)
        ):
            kind, data = lib.KINDS[stored.kind], np.ascontiguousarray(stored.data)
        else:
            tensor = self.checkpoint.tensor(name).contiguous()
            kind = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}[tensor.dtype]
            data = tensor.view(torch.uint8).numpy().reshape(outs, -1)
        packed = self.arena.take(self.packed_size(name))
        self.library.octavo_pack(
            self.engine, kind, data.ctypes.data, data.strides[0], outs, ins, target, packed.ctypes.data
        )
        return lib.Matrix(target, outs, ins, 0, packed.ctypes.data, self.vector(prefix + ".bias"))

    def vector(self, name: str) -> int | None:
        """A norm or bias in float32; None when the model has none."""
        if name not in self.names:
            return None
        values = self.checkpoint.tensor(name).float().contiguous().numpy().copy()
        self.kept.append(values)
        return int(values.ctypes.data)

    def fill_layer(self, layer: Any, index: int) -> None:
        prefix = f"model.layers.{index}."
        for slot, part in enumerate("qkv"):
            layer.qkv[slot] = self.matrix(f"{prefix}self_attn.{part}_proj")
        layer.output = self.matrix(prefix + "self_attn.o_proj")
        layer.gate_up[0], layer.gate_up[1] = self.matrix(prefix + "mlp.gate_proj"), self.matrix(prefix + "mlp.up_proj")
        layer.down = self.matrix(prefix + "mlp.down_proj")
        layer.attention_norm = self.vector(prefix + "input_layernorm.weight")
        layer.mlp_norm = self.vector(prefix + "post_attention_layernorm.weight")
        layer.q_norm, layer.k_norm = (self.vector(f"{prefix}self_attn.{p}_norm.weight") for p in "qk")
        layer.window = self.config.windows[index] or 0


def check_shape(config: ModelConfig) -> None:
    """Raise KernelError for a shape the kernels have no code for."""
    widths = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
    if config.num_heads // config.num_kv_heads > 64:
        raise KernelError("the CPU kernels share a key among at most 64 heads")
    if any(width % 32 for width in widths) or config.head_dim % 16 or config.head_dim > 512:
        raise KernelError(
            f"the CPU kernels need widths in multiples of 32 and heads of 16, not {widths} and {config.head_dim}"
        )
