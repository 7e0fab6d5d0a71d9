"""From an opened checkpoint and a plan to a runner: where the native or the torch path is chosen."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from models.base import Runner
from models.errors import KernelError
from models.loading.checkpoint import Checkpoint

if TYPE_CHECKING:
    from models.cpu.pages import KVDtype
    from models.cpu.weights import WeightFormat

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
    warning, and int8 keys and values are in `dtype`. `attention_backend` is "cpu" for the native path, "torch", or
    "triton" for torch with the kernels of `models.triton`. Raises ModelError.
    """
    if device == "cpu" and attention_backend == "cpu":
        try:
            if "float16" in (dtype, kv_dtype):
                raise KernelError("the CPU kernels have no float16 arithmetic")
            from models.cpu.runner import CpuRunner

            weights = cast("WeightFormat", dtype if quantization == "none" else quantization)
            kv = cast("KVDtype", kv_dtype)
            return CpuRunner(checkpoint, weights=weights, kv_dtype=kv, threads=threads, max_length=max_model_len)
        except KernelError as error:
            log.warning("%s; serving with torch operators, which are slower", error)
    import torch

    from models.decoder import PLAIN, Decoder, Operators
    from models.torch_attention import TorchAttention
    from models.torch_runner import TorchRunner

    operators, attention = PLAIN, TorchAttention
    if attention_backend == "triton":
        from models.triton.attention import TritonAttention
        from models.triton.operators import TritonLinear, rms_norm

        operators, attention = Operators(TritonLinear, rms_norm), TritonAttention

    torch.set_num_threads(threads)
    where, kind, kv_kind = (
        torch.device(device),
        getattr(torch, dtype),
        getattr(torch, dtype if kv_dtype == "int8" else kv_dtype),
    )
    names = set(checkpoint.names())
    decoder = Decoder(
        checkpoint.config, checkpoint.tensor, names,
        device=where, dtype=kind, max_length=max_model_len, operators=operators,
    )  # fmt: skip
    return TorchRunner(decoder, attention(checkpoint.config, where, kv_kind))


def build_key(runner: Runner) -> str:
    """What decides the bits of a page besides model and formats: the kernels' build and the processor."""
    from models.cpu import library
    from models.cpu.runner import CpuRunner

    if isinstance(runner, CpuRunner):
        return library.machine_key(library.compiler() or "")
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else library.machine_key("")
    return f"torch {torch.__version__} {device}"
