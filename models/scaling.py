"""How a step's time grows with batch, context and prompt length, and memory with pages: a runner driven by hand.

    python -m models.scaling [MODEL] [--weights FORMAT] [--threads N] [--quick]

prints one JSON object. Keys and values are random numbers in pages of random order, so that nothing is warmer than it
would be in a server. Let nothing else run beside it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from models.base import I32, Batch
from models.cpu.runner import CpuRunner
from models.loading.checkpoint import open_checkpoint
from models.loading.source import resolve_source
from models.plain_batch import plain_batch, plain_runner
from models.probe import answer, measure
from models.step_cost import StepCost, step_cost

if TYPE_CHECKING:
    from models.cpu.weights import WeightFormat

PAGE_SIZE = 16
CHUNK = 512  # rows of a prompt in one step, as the server's default has it
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
POOLS = (512, 1024, 2048, 4096)  # pages
FIXED_CONTEXTS, FIXED_BATCHES = (128, 1024), (1, 8)  # what the other one is varied at


Point = dict[str, float]  # what was measured, by name; "context" is what each sequence holds after the step


class Rig:
    """A loaded model and the pages it runs on. `seconds` is how long each measurement may take."""

    def __init__(self, runner: CpuRunner, cost: StepCost, seconds: float) -> None:
        self._runner, self._cost, self._seconds = runner, cost, seconds
        self._random = np.random.default_rng(0)
        self._pages = 0

    def allocate(self, pages: int) -> Point:
        """A new pool of random numbers in place of the one before; bytes of it and of the whole process."""
        self._runner.allocate(pages, PAGE_SIZE)
        self._pages = pages
        memory = self._runner.memory.memory.view(np.uint16)
        # bfloat16 between 1/8 and 1/2 of either sign, which as halves of float32 are such numbers too.
        numbers = self._random.integers(0x3E00, 0x3F00, 1 << 16, np.uint16)
        numbers |= self._random.integers(0, 2, numbers.size, np.uint16) << 15
        for first in range(0, memory.size, numbers.size):
            part = memory[first : first + numbers.size]
            part[:] = numbers[: part.size]
        pool_bytes = pages * self._runner.page_bytes(PAGE_SIZE)
        return {"pages": pages, "pool_bytes": pool_bytes, "resident_bytes": psutil.Process().memory_info().rss}

    def decode(self, batch: int, context: int) -> Point:
        """One row for each of `batch` sequences that hold `context` tokens."""
        tokens, tables, pairs = self._tokens(batch), self._tables(batch, context), batch * context
        seconds = self._time([plain_batch(tokens, tables, starts=[context - 1] * batch, counts=[1] * batch)])
        cost = {"bytes_read": self._cost.bytes_read(pairs), "operations": self._cost.operations(batch, batch, pairs)}
        return {"batch": batch, "context": context, "rows": batch, "seconds": seconds, **cost}

    def prefill(self, length: int) -> Point:
        """A whole prompt, chunk by chunk, up to its first token."""
        tables, tokens = self._tables(1, length), self._tokens(length)
        steps, read = [], 0
        for start in range(0, length, CHUNK):
            count = min(CHUNK, length - start)
            logit_rows = np.array([count - 1] if start + count == length else [], np.int32)
            chunk = tokens[start : start + count]
            steps.append(plain_batch(chunk, tables, starts=[start], counts=[count], logit_rows=logit_rows))
            read += self._cost.bytes_read(start + count)
        pairs = length * (length + 1) // 2
        cost = {"bytes_read": read, "operations": self._cost.operations(length, 1, pairs)}
        return {"batch": 1, "context": length, "rows": length, "seconds": self._time(steps), **cost}

    def _tokens(self, count: int) -> I32:
        return self._random.integers(0, self._runner.config.vocab_size, count, np.int32)

    def _tables(self, batch: int, context: int) -> I32:
        each = -(-context // PAGE_SIZE)
        if batch * each > self._pages:
            raise ValueError(f"{batch} sequences of {context} tokens need more than {self._pages} pages")
        return self._random.permutation(self._pages)[: batch * each].astype(np.int32).reshape(batch, each)

    def _time(self, steps: Sequence[Batch]) -> float:
        """The median of some runs, the first one left out."""

        def once() -> float:
            began = time.perf_counter()
            for step in steps:
                self._runner.run(step)
            return time.perf_counter() - began

        once()
        taken: list[float] = []
        while len(taken) < 3 or (sum(taken) < self._seconds and len(taken) < 100):
            taken.append(once())
        return statistics.median(taken)


def points(rig: Rig, longest: int, quick: bool) -> Iterator[tuple[str, Point]]:
    """Every measurement, with the list it belongs to."""
    pools = POOLS[:2] if quick else POOLS
    for pages in pools:
        yield "memory", rig.allocate(pages)
    room = pools[-1] * PAGE_SIZE
    pairs = {(batch, context) for context in FIXED_CONTEXTS for batch in BATCHES}
    pairs |= {(batch, context) for context in CONTEXTS for batch in FIXED_BATCHES}
    for batch, context in sorted(pairs):
        if context <= longest and batch * context <= room:
            yield "decode", rig.decode(batch, context)
    for length in LENGTHS:
        if length <= min(longest, room, 1024 if quick else longest):
            yield "prefill", rig.prefill(length)


def run(model: str | None, weights: WeightFormat, threads: int, quick: bool) -> dict[str, Any]:
    """Measure everything, and tell of it on stderr. Raises ModelError."""
    checkpoint = open_checkpoint(resolve_source(model))
    longest = min(checkpoint.config.max_position, CONTEXTS[-1])
    runner = plain_runner(checkpoint, weights, threads, longest)
    cost = step_cost(runner)
    content: dict[str, Any] = {
        "model": checkpoint.name,
        "weights": weights,
        "threads": threads,
        "chunk": CHUNK,
        "page_size": PAGE_SIZE,
        "ceilings": asdict(measure(threads)),
        "cost": asdict(cost),
    }
    for kind, point in points(Rig(runner, cost, 0.05 if quick else 0.4), longest, quick):
        print(f"{kind}: {point}", file=sys.stderr)
        content.setdefault(kind, []).append(point)
    return content


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 2 when it cannot."""
    parser = argparse.ArgumentParser(prog="python -m models.scaling", description="Measure how steps scale.")
    parser.add_argument("--weights", default="stored", metavar="FORMAT")
    parser.add_argument("--quick", action="store_true", help="fewer runs and sizes, to try it out")
    return answer(parser, arguments, run)


if __name__ == "__main__":
    sys.exit(main())
