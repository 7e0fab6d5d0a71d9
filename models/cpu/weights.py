"""A checkpoint's matrices packed for the CPU kernels, and the C structures that point at them.

Owner: the runner. Knows names and formats, not what is done with a matrix.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from models.config import ModelConfig
from models.cpu import library as lib
from models.cpu.memory import Arena, aligned
from models.errors import KernelError
from models.loading.checkpoint import Checkpoint
from models.loading.layout import EMBEDDING, FINAL_NORM, LM_HEAD, Shape, tensor_shapes
from models.loading.stored import FLOATS

WeightFormat = Literal["stored", "float32", "bfloat16", "int8", "int4"]

FOUR_BIT_KINDS = ("Q4_0", "Q4_1", "Q4_K")


class Packing(NamedTuple):
    """How one matrix is packed."""

    format: int  # of linear.h
    outs: int
    ins: int
    nbytes: int  # with what aligns the next


class PackedWeights:
    """Every matrix and vector of a model in the kernels' own layout.

    `layers`, `embedding` and `head` are the C structures; this object keeps the memory behind them alive. `stored`
    serves a GGUF file's own quantisation and makes plain floats bfloat16.
    """

    def __init__(self, checkpoint: Checkpoint, weights: WeightFormat, engine: int) -> None:
        self.library, self.engine, self.config = lib.load_library(), engine, checkpoint.config
        check_shape(self.config)
        self.shapes = tensor_shapes(self.config)
        self.packings = {
            name: self.packing(shape, matrix_format(name, checkpoint.stored_kind(name), weights))
            for name, shape in self.shapes.items()
            if len(shape) == 2
        }
        self.nbytes = sum(packing.nbytes for packing in self.packings.values())
        self.arena = Arena(self.nbytes)
        self.kept: list[Any] = []
        self.layers = (lib.Layer * self.config.num_layers)()
        for index, layer in enumerate(self.layers):
            self.fill_layer(checkpoint, layer, index)
        self.embedding = self.matrix(checkpoint, "model.embed_tokens")
        self.head = self.embedding if self.config.tie_embeddings else self.matrix(checkpoint, "lm_head")
        self.final_norm = self.vector(checkpoint, FINAL_NORM)

    def packing(self, shape: Shape, target: int) -> Packing:
        outs, ins = shape
        return Packing(target, outs, ins, aligned(self.library.octavo_packed_bytes(target, outs, ins)))

    def matrix(self, checkpoint: Checkpoint, prefix: str) -> lib.Matrix:
        """Pack one matrix, with its bias if there is one."""
        name = prefix + ".weight"
        target, outs, ins, nbytes = self.packings[name]
        stored = checkpoint.stored(name)
        kind, data = stored.kind, stored.data
        if not packs(kind, target):
            kind, data = "F32", stored.numbers().view(np.uint8)
        packed = self.arena.take(nbytes)
        self.library.octavo_pack(
            self.engine, lib.KINDS[kind], data.ctypes.data, data.strides[0], outs, ins, target, packed.ctypes.data
        )
        return lib.Matrix(target, outs, ins, 0, packed.ctypes.data, self.vector(checkpoint, prefix + ".bias"))

    def vector(self, checkpoint: Checkpoint, name: str) -> int | None:
        """A norm or bias in float32; None when the model has none."""
        if name not in self.shapes:
            return None
        values = np.array(checkpoint.stored(name).numbers())
        self.kept.append(values)
        return int(values.ctypes.data)

    def fill_layer(self, checkpoint: Checkpoint, layer: Any, index: int) -> None:
        prefix = f"model.layers.{index}."
        for slot, part in enumerate("qkv"):
            layer.qkv[slot] = self.matrix(checkpoint, f"{prefix}self_attn.{part}_proj")
        layer.output = self.matrix(checkpoint, prefix + "self_attn.o_proj")
        layer.gate_up[0], layer.gate_up[1] = (
            self.matrix(checkpoint, prefix + "mlp.gate_proj"),
            self.matrix(checkpoint, prefix + "mlp.up_proj"),
        )
        layer.down = self.matrix(checkpoint, prefix + "mlp.down_proj")
        layer.attention_norm = self.vector(checkpoint, prefix + "input_layernorm.weight")
        layer.mlp_norm = self.vector(checkpoint, prefix + "post_attention_layernorm.weight")
        layer.q_norm, layer.k_norm = (self.vector(checkpoint, f"{prefix}self_attn.{p}_norm.weight") for p in "qk")
        layer.window = self.config.windows[index] or 0


def matrix_format(name: str, kind: str, weights: WeightFormat) -> int:
    """The kernels' format for a matrix that its file stores as `kind`."""
    if weights == "int4":  # four bits cost the vocabulary's rows more than they save
        return lib.W8 if name in (EMBEDDING, LM_HEAD) else lib.W4
    if weights != "stored":
        return {"float32": lib.F32, "bfloat16": lib.BF16, "int8": lib.W8}[weights]
    if kind in FLOATS:
        return lib.BF16
    return lib.W4 if kind in FOUR_BIT_KINDS else lib.W8


def packs(kind: str, target: int) -> bool:
    """Whether the kernels pack that format from numbers stored as `kind`, with its codes as they are."""
    return kind in FLOATS or target == lib.W8 or (target == lib.W4 and kind in FOUR_BIT_KINDS)


def check_shape(config: ModelConfig) -> None:
    """Raise KernelError for a shape the kernels have no code for."""
    widths = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
    if config.num_heads // config.num_kv_heads > 64:
        raise KernelError("the CPU kernels share a key among at most 64 heads")
    if any(width % 32 for width in widths) or config.head_dim % 16 or config.head_dim > 512:
        raise KernelError(
            f"the CPU kernels need widths in multiples of 32 and heads of 16, not {widths} and {config.head_dim}"
        )
