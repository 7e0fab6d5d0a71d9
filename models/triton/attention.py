"""Paged attention in Triton whose result for a row depends on that row's query and on what it may see, on nothing else.

A program computes one row and the query heads that share one KV head. It walks the row's page table in blocks of 64
keys counted from slot 0, with online softmax in float32 (Milakov and Gimelshein 2018; Dao et al., FlashAttention,
2022), whatever the number of rows, the chunking or the page size: the argument of `models/cpu/attention.h`. A sequence
is not cut over several programs, so one long sequence alone does not fill a GPU. Called as `TorchAttention` is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from models.torch_attention import TorchAttention

KEY_BLOCK = 64  # keys between two rescalings
LEAST_TILE = 16  # query heads in the tile of a product: the fewest that tensor cores multiply
ALL = 1 << 30  # the window of a layer without one
LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["table_width"])
def _attend(
    query, keys, values, tables, sequences, slots, out, scale, table_width,
    kv_heads: tl.constexpr, shared: tl.constexpr, dim: tl.constexpr, page_size: tl.constexpr, window: tl.constexpr,
    kind: tl.constexpr, tile: tl.constexpr, wide: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, d, key = tl.arange(0, tile), tl.arange(0, wide), tl.arange(0, block)
    slot = tl.load(slots + row).to(tl.int32)
    table = tables + tl.load(sequences + row) * table_width
    place = (row * kv_heads * shared + kv_head * shared + head[:, None]) * dim + d[None, :]
    ours = (head[:, None] < shared) & (d[None, :] < dim)
    q = tl.load(query + place, ours, 0.0).to(kind)
    top = tl.full((tile,), float("-inf"), tl.float32)
    mass = tl.zeros((tile,), tl.float32)
    total = tl.zeros((tile, wide), tl.float32)
    first = tl.maximum(slot - window + 1, 0) // block * block  # blocks of keys that the row does not see change nothing
    for start in range(first, slot + 1, block):
        at = start + key
        page = tl.load(table + at // page_size, at <= slot, 0)
        inside = ((page * kv_heads + kv_head) * page_size + at % page_size) * dim
        k = tl.load(keys + inside[None, :] + d[:, None], (at[None, :] <= slot) & (d[:, None] < dim), 0.0).to(kind)
        v = tl.load(values + inside[:, None] + d[None, :], (at[:, None] <= slot) & (d[None, :] < dim), 0.0).to(kind)
        seen = (at <= slot) & (slot - at < window)
        scores = tl.where(seen[None, :], tl.dot(q, k, input_precision="ieee") * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))  # finite: every block walked has a key that the row sees
        weights, kept = tl.exp2(scores - higher[:, None]), tl.exp2(top - higher)
        mass = mass * kept + tl.sum(weights, 1)
        total = tl.dot(weights.to(kind), v, total * kept[:, None], input_precision="ieee")
        top = higher
    tl.store(out + place, (total / mass[:, None]).to(out.dtype.element_ty), ours)


class TritonAttention(TorchAttention):
    """`TorchAttention` with another kernel over the same pages."""

    def read(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        c, (keys, values) = self.config, self.memory[layer]
        query, shared = query.contiguous(), c.num_heads // c.num_kv_heads
        out = torch.empty_like(query)
        # bfloat16 and float16 multiply as they are when queries and pages agree, everything else in float32.
        kind = getattr(tl, str(torch.promote_types(query.dtype, self.dtype)).removeprefix("torch."))
        _attend[(len(query), c.num_kv_heads)](
            query, keys, values, self.tables, self.rows, self.slots, out,
            LOG2_E * c.head_dim**-0.5, self.tables.shape[1],
            c.num_kv_heads, shared, c.head_dim, self.page_size, c.windows[layer] or ALL,
            kind, triton.next_power_of_2(max(shared, LEAST_TILE)), triton.next_power_of_2(max(c.head_dim, LEAST_TILE)),
            KEY_BLOCK,
        )  # fmt: skip
        return out
