"""From an opened checkpoint and a plan to a runner: where the native or the torch path is chosen."""

from __future__ import annotations

import logging
from typing import Literal, cast

from models.base import Runner
from models.errors import KernelError
from models.loading.checkpoint import Checkpoint

log = logging.getLogger("octavo.models")


def build_runner(
    checkpoint: Checkpoint,
    *,
    device: str,
    dtype: str,
    quantization: str,
    kv_dtype: str,
    attention_backend: str,
    threads: int,
    max_model_len: int,
) -> Runner:
    """The fastest runner for the plan.

    `quantization` is "none" (weights in `dtype`), "stored" (a GGUF file's own blocks), "int8" or "int4". Without a
    compiler, or for a shape the kernels have no code for, the torch operators serve the dequantised weights, with one
    warning. `attention_backend` is "cpu" for the native path or "torch". Raises ModelError.
    """
    if device == "cpu" and attention_backend == "cpu":
        try:
            return _native(checkpoint, dtype, quantization, kv_dtype, threads, max_model_len)
        except KernelError as error:
            log.warning("%s; serving with torch operators, which are slower", error)
    return _torch(checkpoint, device, dtype, kv_dtype, max_model_len, threads)


def _native(
    checkpoint: Checkpoint, dtype: str, quantization: str, kv_dtype: str, threads: int, max_model_len: int
) -> Runner:
    from models.cpu.runner import CpuRunner
    from models.cpu.weights import WeightFormat

    if dtype == "float16" or kv_dtype == "float16":
        raise KernelError("the CPU kernels have no float16 arithmetic")
    weights = dtype if quantization == "none" else quantization
    return CpuRunner(
        checkpoint,
        weights=cast("WeightFormat", weights),
        kv_dtype=cast("Literal['bfloat16', 'float32']", kv_dtype),
        threads=threads,
        max_length=max_model_len,
    )


def _torch(checkpoint: Checkpoint, device: str, dtype: str, kv_dtype: str, max_model_len: int, threads: int) -> Runner:
    import torch

    from models.decoder import Decoder
    from models.torch_attention import TorchAttention
    from models.torch_runner import TorchRunner

    torch.set_num_threads(threads)
    where, kind = torch.device(device), cast("torch.dtype", getattr(torch, dtype))
    decoder = Decoder(
        checkpoint.config,
        checkpoint.tensor,
        set(checkpoint.names()),
        device=where,
        dtype=kind,
        max_length=max_model_len,
    )
    return TorchRunner(decoder, TorchAttention(checkpoint.config, where, cast("torch.dtype", getattr(torch, kv_dtype))))


def build_key(runner: Runner) -> str:
    """What decides the bits of a page besides model and formats: the kernels' build and the processor."""
    from models.cpu import library
    from models.cpu.runner import CpuRunner

    if isinstance(runner, CpuRunner):
        return library.machine_key(library.compiler() or "")
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else library.machine_key("")
    return f"torch {torch.__version__} {device}"
