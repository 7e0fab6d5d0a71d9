"""The runner for the CPU: one call into the native library a step, forward and sampling together.

Owner: the engine's worker thread. The arrays of a step are read in place; nothing is copied but pointers.
"""

from __future__ import annotations

import ctypes
from typing import Literal

import numpy as np

from models.base import F32, U8, Batch, StepOutput
from models.cpu import library as lib
from models.cpu.pages import KvPages
from models.cpu.sampling_abi import empty_output, sampling_view
from models.cpu.weights import PackedWeights, WeightFormat
from models.loading.checkpoint import Checkpoint
from models.rope import rope_tables


class CpuRunner:
    """See `models.base.Runner`. `kv_dtype` is what keys and values are kept in."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        weights: WeightFormat,
        kv_dtype: Literal["bfloat16", "float32"],
        threads: int,
        max_length: int,
    ) -> None:
        self.library = lib.load_library()
        self.config = checkpoint.config
        self.pages = KvPages(self.config, 4 if kv_dtype == "float32" else 2)
        self.engine = self.library.octavo_engine(threads)
        self.weights = PackedWeights(checkpoint, weights, self.engine)
        self.cosine, self.sine = rope_tables(self.config, max_length)
        c, w = self.config, self.weights
        self.model = lib.Model(
            hidden=c.hidden_size,
            intermediate=c.intermediate_size,
            layers=c.num_layers,
            heads=c.num_heads,
            kv_heads=c.num_kv_heads,
            dim=c.head_dim,
            vocab=c.vocab_size,
            kv_float32=kv_dtype == "float32",
            eps=c.norm_eps,
            cosine=self.cosine.ctypes.data,
            sine=self.sine.ctypes.data,
            final_norm=w.final_norm,
            embedding=w.embedding,
            head=w.head,
            layer=w.layers,
        )

    def __del__(self) -> None:
        if getattr(self, "engine", None):
            self.library.octavo_engine_free(self.engine)

    def page_bytes(self, page_size: int) -> int:
        return self.pages.page_bytes(page_size)

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Raises ValueError unless `page_size` is a multiple of 16, the kernels' tile."""
        self.model.page_size = page_size
        self.pages.allocate(num_pages, page_size, self.weights.layers)

    def read_page(self, page: int, out: U8) -> None:
        self.pages.read(page, out)

    def write_page(self, page: int, data: U8) -> None:
        self.pages.write(page, data)

    def run(self, batch: Batch) -> StepOutput:
        step, kept = lib.make_step(batch)
        view = sampling_view(batch.sampling, self.config.vocab_size)
        result, output = empty_output(len(batch.logit_rows), batch.sampling.num_logprobs)
        step.sampling, step.output = ctypes.addressof(view), ctypes.addressof(output)
        self.library.octavo_step(self.engine, self.model, step)
        del kept
        return result

    def logits(self, batch: Batch) -> F32:
        """The logits of the step's logit rows [L, vocab], unsampled: for tests and evaluation."""
        step, kept = lib.make_step(batch)
        out = np.empty((len(batch.logit_rows), self.config.vocab_size), np.float32)
        step.logits_out = out.ctypes.data
        self.library.octavo_step(self.engine, self.model, step)
        del kept
        return out
