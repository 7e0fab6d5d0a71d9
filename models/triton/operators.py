"""Matrix product and RMSNorm in Triton whose result for a row does not depend on how many rows there are.

One tile and one order over the summed axis serve every shape: no split, no autotuning, no TF32. The libraries behind
torch choose tile and split by the number of rows, and with them the order of every sum. The idea is that of Thinking
Machines' "Defeating Nondeterminism in LLM Inference" (2025).
Called by the thread that runs the model; knows nothing of sequences or pages.

NOTE: Triton compiles another binary for an integer argument that is 1 or a multiple of 16. The number of rows is kept
from that (`do_not_specialize`), so that one binary computes every step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows, outputs and summands of a tile. In float32 three stages of it are 96 KiB, which every GPU from Ampere on has.
TILE_ROWS, TILE_OUTPUTS, TILE_INPUTS = 64, 64, 64


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x, weight, bias, out, rows,
    inputs: tl.constexpr, outputs: tl.constexpr, with_bias: tl.constexpr,
    tile_rows: tl.constexpr, tile_outputs: tl.constexpr, tile_inputs: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(1) * tile_rows + tl.arange(0, tile_rows)).to(tl.int64)
    column = (tl.program_id(0) * tile_outputs + tl.arange(0, tile_outputs)).to(tl.int64)
    inner = tl.arange(0, tile_inputs)
    total = tl.zeros((tile_rows, tile_outputs), tl.float32)
    for first in range(0, inputs, tile_inputs):
        k = first + inner
        a = tl.load(x + row[:, None] * inputs + k[None, :], (row[:, None] < rows) & (k[None, :] < inputs), 0.0)
        there = (column[None, :] < outputs) & (k[:, None] < inputs)
        b = tl.load(weight + column[None, :] * inputs + k[:, None], there, 0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    if with_bias:
        total += tl.load(bias + column, column < outputs, 0.0).to(tl.float32)[None, :]
    where = out + row[:, None] * outputs + column[None, :]
    tl.store(where, total.to(out.dtype.element_ty), (row[:, None] < rows) & (column[None, :] < outputs))


@triton.jit
def _rms_norm(x, weight, out, eps, size: tl.constexpr, block: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    wide = tl.load(x + row * size + i, i < size, 0.0).to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    # Rounded before the weight is applied, as in `models.decoder.rms_norm`.
    scaled = scaled.to(out.dtype.element_ty).to(tl.float32) * tl.load(weight + i, i < size, 0.0).to(tl.float32)
    tl.store(out + row * size + i, scaled.to(out.dtype.element_ty), i < size)


class TritonLinear:
    """`models.decoder.Linear` for x [T, in], weight [out, in] and bias [out] of one dtype; summed in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight.contiguous(), bias

    def __call__(self, x: Tensor) -> Tensor:
        rows, (outputs, inputs) = len(x), self.weight.shape
        out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
        # Tiles of rows come last: only the first axis of a grid may be longer than 65,535.
        grid = (triton.cdiv(outputs, TILE_OUTPUTS), triton.cdiv(rows, TILE_ROWS))
        if rows:
            _linear[grid](
                x.contiguous(), self.weight, self.bias, out, rows, inputs, outputs, self.bias is not None,
                TILE_ROWS, TILE_OUTPUTS, TILE_INPUTS,
            )  # fmt: skip
        return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`models.decoder.rms_norm`, over the last axis of x; a row is one program's, in one block."""
    x, size = x.contiguous(), x.shape[-1]
    out = torch.empty_like(x)
    if len(x):
        _rms_norm[(x.numel() // size,)](x, weight, out, eps, size, triton.next_power_of_2(size))
    return out
