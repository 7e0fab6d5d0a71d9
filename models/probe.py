"""What this machine can do at best: bytes read and operations computed in a second.

    python -m models.probe [MODEL] [--weights stored bfloat16] [--threads N]

prints one JSON object: the ceilings, and for each weights format what a step of the model costs. A ceiling is the best
that anything here reaches on a problem made for it: the kernels, numpy or torch. So no engine built on this code can be
above it, and the machine itself may be a little better still. Let nothing else run beside it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from config.hardware import Hardware
from models.cpu import library as lib
from models.cpu.memory import Arena
from models.errors import ModelError
from models.loading.checkpoint import open_checkpoint
from models.loading.source import resolve_source
from models.plain_batch import plain_runner
from models.step_cost import step_cost

if TYPE_CHECKING:
    import torch

    from models.cpu.weights import WeightFormat

READ_BYTES = 256 << 20  # far more than any cache holds
SIDE = 2048  # of the square products
ROWS = 1024  # of the kernels' products


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Per second, all threads together."""

    bytes_read: float
    int8_operations: float
    bfloat16_operations: float
    float32_operations: float


def measure(threads: int) -> Ceilings:
    """Some seconds of work."""
    import torch

    torch.set_num_threads(threads)
    kernels = Kernels(threads)
    return Ceilings(
        bytes_read=read_rate(kernels, threads),
        int8_operations=max(operation_rate(kernels, form) for form in (lib.W8, lib.W4)),
        bfloat16_operations=operation_rate(kernels, lib.BF16),
        float32_operations=operation_rate(kernels, lib.F32),
    )


def read_rate(kernels: Kernels, threads: int) -> float:
    """The highest of the kernels' and numpy's."""
    return max(_numpy_read_rate(threads), *(kernels.read_rate(form) for form in (lib.W4, lib.W8, lib.BF16)))


def operation_rate(kernels: Kernels, form: int) -> float:
    """In the arithmetic of a weights format: the kernels' rate or torch's, whichever is higher."""
    import torch

    kind = {lib.F32: torch.float32, lib.BF16: torch.bfloat16}.get(form, torch.int8)
    return max(kernels.operation_rate(form), torch_rate(kind, torch.device("cpu"), SIDE))


def torch_rate(kind: torch.dtype, device: torch.device, side: int) -> float:
    """Operations of a square product."""
    import torch

    square = torch.randint(-100, 100, (side, side), dtype=torch.int8, device=device).to(kind)
    product = torch._int_mm if kind == torch.int8 else torch.matmul
    return float(2 * side**3 / best(lambda: product(square, square)[0, 0].item(), 5))  # the item waits for the device


def best(work: Callable[[], object], times: int) -> float:
    """Seconds of the quickest of so many runs."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


class Kernels:
    """The native matrix product on matrices of random codes."""

    def __init__(self, threads: int) -> None:
        self.library = lib.load_library()
        self.engine = self.library.octavo_engine(threads)
        self.memory = Arena(READ_BYTES).memory
        # Bytes that are small numbers in every format: codes and fp16 headers, bfloat16, float32.
        numbers = np.random.default_rng(0).integers(0x2C00, 0x3000, 1 << 16, np.uint16)
        self.memory.view(np.uint16).reshape(-1, numbers.size)[:] = numbers

    def __del__(self) -> None:
        if getattr(self, "engine", None):
            self.library.octavo_engine_free(self.engine)

    def read_rate(self, form: int) -> float:
        """One row times the largest matrix that fits: nothing but reading it."""
        outs = READ_BYTES // self.library.octavo_packed_bytes(form, 16, SIDE) * 16
        return self.library.octavo_packed_bytes(form, outs, SIDE) / self._seconds(form, outs, 1, 5)  # type: ignore[no-any-return]

    def operation_rate(self, form: int) -> float:
        """Many rows times a matrix that stays in the cache: nothing but multiplying."""
        return 2 * ROWS * SIDE * SIDE / self._seconds(form, SIDE, ROWS, 3)

    def _seconds(self, form: int, outs: int, rows: int, times: int) -> float:
        matrix = lib.Matrix(form, outs, SIDE, 0, self.memory.ctypes.data, None)
        x, out = np.ones((rows, SIDE), np.float32), np.empty((rows, outs), np.float32)
        arguments: tuple[Any, ...] = (self.engine, matrix, x.ctypes.data, rows, ctypes.c_void_p(out.ctypes.data))
        return best(lambda: self.library.octavo_linear(*arguments), times)


def _numpy_read_rate(threads: int) -> float:
    """The largest of many numbers, a part of them in each thread."""
    numbers = np.ones(READ_BYTES // 4, np.int32)
    parts = np.array_split(numbers, threads)
    with ThreadPoolExecutor(threads) as pool:
        return READ_BYTES / best(lambda: list(pool.map(np.max, parts)), 10)


def costs(model: str | None, formats: Iterable[WeightFormat], threads: int) -> dict[str, dict[str, int]]:
    """What a step costs in each weights format. Raises ModelError."""
    checkpoint = open_checkpoint(resolve_source(model))
    return {weights: asdict(step_cost(plain_runner(checkpoint, weights, threads, 16))) for weights in formats}


def answer(parser: argparse.ArgumentParser, arguments: Sequence[str] | None, run: Callable[..., object]) -> int:
    """Print as JSON what `run` measures of MODEL; 2 when it cannot. It gets the options, the threads counted."""
    parser.add_argument("model", nargs="?", metavar="MODEL")
    parser.add_argument("--threads", type=int, metavar="N")
    options = parser.parse_args(arguments)
    options.threads = options.threads or Hardware.detect("cpu").cores
    try:
        content = run(**vars(options))
    except ModelError as error:
        print(f"{parser.prog.rpartition('.')[2]}: {error}", file=sys.stderr)
        return 2
    print(json.dumps(content))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 2 when it cannot."""
    parser = argparse.ArgumentParser(prog="python -m models.probe", description="Measure what this machine can do.")
    parser.add_argument("--weights", nargs="*", default=["stored", "bfloat16"], metavar="FORMAT")

    def run(model: str | None, weights: Sequence[WeightFormat], threads: int) -> object:
        ceilings = asdict(measure(threads))
        return {"threads": threads, "ceilings": ceilings, "costs": costs(model, weights, threads)}

    return answer(parser, arguments, run)


if __name__ == "__main__":
    sys.exit(main())
