"""The native kernels' attention alone, called as `models.torch_attention` is, to compare the two."""

from __future__ import annotations

import ctypes

import torch

from models.base import Batch
from models.config import ModelConfig
from models.cpu import library as lib
from models.cpu.pages import KV_FORMATS, KVDtype, NativePages
from models.cpu.weights import check_shape


class CpuAttention(NativePages):
    """See `TorchAttention`; pages as attention.h lays them out."""

    def __init__(self, config: ModelConfig, kv_dtype: KVDtype, threads: int) -> None:
        check_shape(config)
        super().__init__(config, kv_dtype=kv_dtype, threads=threads)
        self.layers = (lib.Layer * config.num_layers)()
        for layer, window in zip(self.layers, config.windows, strict=True):
            layer.window = window or 0
        self.model = lib.Model(
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            dim=config.head_dim,
            layers=config.num_layers,
            kv_format=KV_FORMATS[kv_dtype],
        )

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
