"""The runner for the CPU: one call into the native library a step, forward and sampling together.

Owner: the engine's worker thread. The arrays of a step are read in place; nothing is copied but pointers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from models.base import F32, Batch, StepOutput
from models.cpu import library as lib
from models.cpu.pages import KV_FORMATS, KVDtype, NativePages
from models.cpu.sampling_abi import empty_output, sampling_view
from models.cpu.weights import PackedWeights, WeightFormat
from models.loading.checkpoint import Checkpoint
from models.rope import rope_tables


class CpuRunner(NativePages):
    """See `models.base.Runner`. `kv_dtype` is what keys and values are kept in."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        weights: WeightFormat,
        kv_dtype: KVDtype,
        threads: int,
        max_length: int,
    ) -> None:
        super().__init__(checkpoint.config, kv_dtype=kv_dtype, threads=threads)
        self.weights = PackedWeights(checkpoint, weights, self.engine)
        self.layers = self.weights.layers
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
            kv_format=KV_FORMATS[kv_dtype],
            eps=c.norm_eps,
            cosine=self.cosine.ctypes.data,
            sine=self.sine.ctypes.data,
            final_norm=w.final_norm,
            embedding=w.embedding,
            head=w.head,
            layer=self.layers,
        )

    def run(self, batch: Batch) -> StepOutput:
        step, result, kept = self._step(batch)
        self.library.octavo_step(self.engine, self.model, step)
        del kept
        return result

    def start(self, batch: Batch, descriptor: int) -> Callable[[], StepOutput]:
        step, result, kept = self._step(batch)
        self.library.octavo_start(self.engine, self.model, step, descriptor)
        return lambda: (result, step, kept)[0]  # what the step reads and writes lives as long as this function

    def _step(self, batch: Batch) -> tuple[lib.Step, StepOutput, object]:
        """The C structures of a step, where its results will be, and what must be kept alive until it is done."""
        step, kept = lib.make_step(batch)
        view = sampling_view(batch.sampling, self.config.vocab_size)
        result, output = empty_output(len(batch.logit_rows), batch.sampling.num_logprobs)
        step.sampling, step.output = ctypes.addressof(view), ctypes.addressof(output)
        return step, result, (kept, view, output)

    def logits(self, batch: Batch) -> F32:
        """The logits of the step's logit rows [L, vocab], unsampled: for tests and evaluation."""
        step, kept = lib.make_step(batch)
        out = np.empty((len(batch.logit_rows), self.config.vocab_size), np.float32)
        step.logits_out = out.ctypes.data
        self.library.octavo_step(self.engine, self.model, step)
        del kept
        return out
