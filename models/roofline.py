"""How near the model's steps can come to what this machine does at best: what a step costs, and the ceilings.

The ceilings are measured once for a machine, a device and an arithmetic, in a second, and kept in the cache folder.
A busy machine would give wrong ones, late: a later start measures them. For the native kernels the ceiling of
arithmetic is what they reach themselves, so that torch need not be imported: `models.probe` tries torch's too.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from config.hardware import Hardware
from models.base import Runner
from models.build import build_key
from models.cpu.runner import CpuRunner
from models.loading.cache import build_once, cache_path
from models.probe import READ_BYTES, SIDE, Kernels, best, read_rate, torch_rate
from models.step_cost import StepCost, cost_of, matrix_sizes, step_cost

if TYPE_CHECKING:
    import torch

BUSY = 1.0  # processes that wanted to run in the last minute, for each core: more than a first start makes


Rates = tuple[float, float]  # bytes read and operations, in the arithmetic of the weights, a second


@dataclass(frozen=True, slots=True)
class Roofline:
    """What the model's steps cost, and what bounds them."""

    cost: StepCost
    best: Rates | None  # None while that is not known


def roofline(runner: Runner, threads: int) -> Roofline | None:
    """Of a loaded model; None for a runner of another kind.

    Raises CacheError where nothing can be kept, RuntimeError where memory is short.
    """
    if isinstance(runner, CpuRunner):
        sizes = Counter[int]()
        for packing in runner.weights.packings.values():
            sizes[packing.format] += packing.nbytes
        [(form, _)] = sizes.most_common(1)
        return Roofline(step_cost(runner), _kept(runner, f"{threads} {form}", lambda: _native(threads, form)))
    from models.torch_runner import TorchRunner

    if isinstance(runner, TorchRunner):
        weights = runner.decoder.embedding
        cost = cost_of(runner.config, sum(matrix_sizes(runner.config)) * weights.itemsize, runner.page_bytes(16) // 16)
        return Roofline(cost, _kept(runner, f"{threads} {weights.dtype}", lambda: _torch(weights)))
    return None


def _kept(runner: Runner, arithmetic: str, measure: Callable[[], Rates]) -> Rates | None:
    """From the cache folder if they are there; None while the machine is too busy to measure."""
    digest = hashlib.sha256(f"{build_key(runner)} {arithmetic}".encode()).hexdigest()[:24]
    path = cache_path("ceilings", digest, ".json")
    if psutil.getloadavg()[0] > BUSY * (psutil.cpu_count() or 1) and not path.exists():
        return None

    def write(target: Path) -> None:
        target.write_text(json.dumps(measure()))

    bytes_read, operations = json.loads(build_once(path, write).read_text())
    return bytes_read, operations


def _native(threads: int, form: int) -> Rates:
    if Hardware.detect("cpu").free_bytes < 4 * READ_BYTES:
        raise RuntimeError("there is too little memory left to measure with")
    kernels = Kernels(threads)
    return read_rate(kernels, threads), kernels.operation_rate(form)


def _torch(weights: torch.Tensor) -> Rates:
    """On the device and in the type of the weights."""
    import torch

    more = 4 if weights.is_cuda else 1  # or the way to the device would count
    numbers = torch.ones(more * READ_BYTES, dtype=torch.int8, device=weights.device)
    read = len(numbers) / best(lambda: numbers.amax().item(), 5)
    return read, torch_rate(weights.dtype, weights.device, more * SIDE)
