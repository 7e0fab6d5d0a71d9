"""How long a step takes by how many rows it has: the cost model that speculation decides by.

Measured once at start, before anything is served, so that the free pages can be written, in rounds: a machine that is
busy for a moment then spoils one look at each number of rows, and the others count. Rows are those of one sequence
with a short context: what more rows cost beyond the reading of the weights, which is what a draft pays.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from models.base import Runner
from models.plain_batch import plain_batch

ROWS = (1, 2, 4, 8, 16, 17, 32)  # 17 do not divide among threads as 16 do
REPEATS = 3
CONTEXT = 64  # tokens before the measured rows


class StepTimes:
    """Seconds by rows: linear between what was measured, and beyond it."""

    def __init__(self, rows: npt.ArrayLike, seconds: npt.ArrayLike) -> None:
        self._rows = np.asarray(rows, np.float64)
        # More rows never take less: what measuring says otherwise is noise.
        self._seconds = np.maximum.accumulate(np.asarray(seconds, np.float64))

    def __call__(self, rows: int) -> float:
        last = self._rows[-1]
        if rows <= last:
            return float(np.interp(rows, self._rows, self._seconds))
        slope = (self._seconds[-1] - self._seconds[-2]) / (last - self._rows[-2])
        return float(self._seconds[-1] + slope * (rows - last))


def measure(
    runner: Runner, num_pages: int, page_size: int, clock: Callable[[], float] = time.perf_counter
) -> StepTimes:
    """Run steps of one sequence, every row sampled greedily. Overwrites the first pages."""
    counts = [count for count in ROWS if CONTEXT + count <= num_pages * page_size] or [1]
    context = CONTEXT if counts != [1] else 0
    pages = np.arange(-(-(context + counts[-1]) // page_size), dtype=np.int32)[None, :]
    batches = [
        plain_batch(
            np.ones(count, np.int32),
            pages,
            starts=[context],
            counts=[count],
            logit_rows=np.arange(count, dtype=np.int32),
        )
        for count in counts
    ]
    seconds = [math.inf] * len(batches)
    for _ in range(REPEATS):
        for i, batch in enumerate(batches):
            began = clock()
            runner.run(batch)
            seconds[i] = min(seconds[i], clock() - began)
    return StepTimes(counts, seconds) if len(counts) > 1 else StepTimes([1, 2], [seconds[0], 2 * seconds[0]])
