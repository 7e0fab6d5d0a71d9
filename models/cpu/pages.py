"""The KV memory of the CPU kernels: one arena, two halves a layer."""

from __future__ import annotations

from typing import Any

from models.base import U8
from models.config import ModelConfig
from models.cpu.memory import Arena, aligned

TILE = 16  # tokens that attention.h keeps together; a page is a whole number of tiles


class KvPages:
    """Keys and values of every layer, `item_bytes` a number."""

    def __init__(self, config: ModelConfig, item_bytes: int) -> None:
        self.config, self.item_bytes = config, item_bytes

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page over all layers."""
        c = self.config
        return c.num_layers * 2 * c.num_kv_heads * page_size * c.head_dim * self.item_bytes

    def allocate(self, num_pages: int, page_size: int, layers: Any) -> None:
        """Take the memory and point the layers' structures at it. Raises ValueError unless tiles fill a page."""
        if page_size % TILE:
            raise ValueError(f"the page size must be a multiple of {TILE} tokens on the CPU, not {page_size}")
        half = aligned(num_pages * self.page_bytes(page_size) // (2 * self.config.num_layers))
        self.memory = Arena(2 * half * self.config.num_layers)
        for layer in layers:
            layer.keys, layer.values = self.memory.take(half).ctypes.data, self.memory.take(half).ctypes.data
        halves = self.memory.memory[: 2 * half * self.config.num_layers].reshape(-1, half)
        run = self.page_bytes(page_size) // len(halves)
        self.halves = halves[:, : num_pages * run].reshape(len(halves), num_pages, run)  # a view

    def read(self, page: int, out: U8) -> None:
        out.reshape(len(self.halves), -1)[:] = self.halves[:, page]

    def write(self, page: int, data: U8) -> None:
        self.halves[:, page] = data.reshape(len(self.halves), -1)
