"""Paged attention by the native kernels, for the decoder in torch operators.

The native runner has its own way to the same code; this backend serves models that only torch can run.
"""

from __future__ import annotations

import ctypes

import torch

from models.base import U8, Batch
from models.config import ModelConfig
from models.cpu import library as lib
from models.cpu.pages import KvPages
from models.cpu.weights import check_shape


class CpuAttention:
    """See `models.attention.base.AttentionBackend`; pages as attention.h lays them out."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, threads: int) -> None:
        check_shape(config)
        self.library = lib.load_library()
        self.engine = self.library.octavo_engine(threads)
        self.config, self.float32 = config, dtype == torch.float32
        self.pages = KvPages(config, 4 if self.float32 else 2)
        self.layers = (lib.Layer * config.num_layers)()
        for layer, window in zip(self.layers, config.windows, strict=True):
            layer.window = window or 0
        self.model = lib.Model(
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            dim=config.head_dim,
            layers=config.num_layers,
            kv_float32=self.float32,
        )

    def __del__(self) -> None:
        if getattr(self, "engine", None):
            self.library.octavo_engine_free(self.engine)

    def page_bytes(self, page_size: int) -> int:
        return self.pages.page_bytes(page_size)

    def allocate(self, num_pages: int, page_size: int) -> None:
        self.model.page_size = page_size
        self.pages.allocate(num_pages, page_size, self.layers)

    def read_page(self, page: int, out: U8) -> None:
        self.pages.read(page, out)

    def write_page(self, page: int, data: U8) -> None:
        self.pages.write(page, data)

    def begin(self, batch: Batch) -> None:
        self.step, self.kept = lib.make_step(batch)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        rows = torch.cat((query, key, value), 1).float().contiguous()
        out = torch.empty(query.shape, dtype=torch.float32)
        self.library.octavo_attend(
            self.engine,
            self.model,
            self.layers[layer],
            self.step,
            ctypes.c_void_p(rows.data_ptr()),
            ctypes.c_void_p(out.data_ptr()),
        )
        return out.to(query.dtype)
