"""Paged attention in plain torch operators, on any device: the reference that the native kernels are tested against.

Owns the KV memory of every layer, and with it the arrangement of numbers inside a page; everyone else knows pages by
their ids alone. One thread at a time calls it: `begin` once a step, then `attend` once a layer, in order. Softmax in
float32; keys and values gathered a sequence at a time.
"""

from __future__ import annotations

import torch

from models.base import U8, Batch
from models.config import ModelConfig


class TorchAttention:
    """K and V of a layer: [pages, kv_heads, page_size, head_dim] each. T query rows of S sequences, as in
    `models.base.Batch`; the methods that are not described here are those of `models.base.Runner`."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        self.page_size = 0
        self.memory: list[tuple[torch.Tensor, torch.Tensor]] = []

    def page_bytes(self, page_size: int) -> int:
        c = self.config
        return c.num_layers * 2 * c.num_kv_heads * page_size * c.head_dim * self.dtype.itemsize

    def allocate(self, num_pages: int, page_size: int) -> None:
        c, self.page_size = self.config, page_size
        shape = (c.num_layers, 2, num_pages, c.num_kv_heads, page_size, c.head_dim)
        self.whole = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self.memory = [(keys, values) for keys, values in self.whole]

    # NOTE: on CUDA these return early. Whoever comes next on the same stream finds the copy done, and that is every
    # step and every other of these copies; memory that is not pinned is copied before they return.
    @torch.inference_mode()
    def read_page(self, page: int, out: U8) -> None:
        torch.from_numpy(out).copy_(self.whole[:, :, page].reshape(-1).view(torch.uint8), non_blocking=True)

    @torch.inference_mode()
    def write_page(self, page: int, data: U8) -> None:
        part = self.whole[:, :, page]
        part.copy_(torch.from_numpy(data).to(self.device, non_blocking=True).view(self.dtype).view(part.shape))

    def begin(self, batch: Batch) -> None:
        """Start a step: copy the pages it asks for, and note where its rows are written and what they may see."""
        to = self.device
        if len(batch.copies[0]):
            source, target = torch.from_numpy(batch.copies[0]).long().to(to).unbind(1)
            for keys, values in self.memory:
                keys[target], values[target] = keys[source], values[source]
        starts, lengths = batch.query_starts.tolist(), batch.lengths.tolist()
        self.spans = list(zip(starts[:-1], starts[1:], lengths, strict=True))
        self.tables = torch.from_numpy(batch.page_tables[0]).long().to(to)
        slots = torch.cat([torch.arange(length - (end - begin), length) for begin, end, length in self.spans]).to(to)
        rows = torch.repeat_interleave(
            torch.arange(len(lengths)), torch.diff(torch.from_numpy(batch.query_starts)).long()
        ).to(to)
        self.slots, self.rows = slots, rows  # of every query row [T]: its slot, and its sequence's row of the tables
        self.pages, self.offsets = self.tables[rows, slots // self.page_size], slots % self.page_size

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Write this layer's keys and values, then attend.

        query [T, heads, head_dim], key and value [T, kv_heads, head_dim], all after RoPE. Returns [T, heads, head_dim].
        """
        keys, values = self.memory[layer]
        keys[self.pages, :, self.offsets] = key.to(self.dtype)
        values[self.pages, :, self.offsets] = value.to(self.dtype)
        return self.read(layer, query)

    def read(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """`attend`, but of keys and values that have been written."""
        c, (keys, values) = self.config, self.memory[layer]
        window, shared = c.windows[layer], c.num_heads // c.num_kv_heads
        out = torch.empty_like(query)
        for index, (begin, end, length) in enumerate(self.spans):
            pages = self.tables[index, : -(-length // self.page_size)]
            k, v = (
                kept[pages].transpose(1, 2).flatten(0, 1)[:length].repeat_interleave(shared, 1)
                for kept in (keys, values)
            )
            scores = torch.einsum("qhd,khd->hqk", query[begin:end].float(), k.float()) * c.head_dim**-0.5
            distance = self.slots[begin:end, None] - torch.arange(length, device=self.device)[None, :]
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[begin:end] = torch.einsum("hqk,khd->qhd", weights, v.float()).to(query.dtype)
        return out
