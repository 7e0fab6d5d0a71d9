"""A runner that notes when each step was computed, for profiling: a step as the model's own thread sees it.

Owner: as the runner inside it. Costs two clock readings a step.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from models.base import Batch, Runner, StartingRunner, StepOutput


@dataclass(frozen=True, slots=True)
class Call:
    """One step, on `time.monotonic`, which is the engine's clock."""

    began: float
    ended: float
    rows: int
    logit_rows: int


class TimedRunner:
    """See `models.base.Runner`; everything but the timing is the inner runner's."""

    def __init__(self, runner: Runner) -> None:
        self.config = runner.config
        self.calls: list[Call] = []
        self._runner = runner
        self._widest: Batch | None = None  # the step with the most logit rows so far
        if isinstance(runner, StartingRunner):
            self.start = self._start

    start: Callable[[Batch, int], Callable[[], StepOutput]] | None = None  # where the inner runner has it

    def run(self, batch: Batch) -> StepOutput:
        began = time.monotonic()
        output = self._runner.run(batch)
        self._note(batch, began)
        return output

    def _start(self, batch: Batch, descriptor: int) -> Callable[[], StepOutput]:
        began = time.monotonic()
        output = cast("StartingRunner", self._runner).start(batch, descriptor)

        def done() -> StepOutput:
            self._note(batch, began)
            return output()

        return done

    def _note(self, batch: Batch, began: float) -> None:
        self.calls.append(Call(began, time.monotonic(), len(batch.token_ids), len(batch.logit_rows)))
        if self._widest is None or len(batch.logit_rows) > len(self._widest.logit_rows):
            self._widest = batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def sampling_seconds_per_row(self, threads: int) -> float | None:
        """What the native sampler takes for a row when `threads` share the rows; None where it is not used.

        The step with the most logit rows is computed again without sampling, and its logits are then sampled. To be
        called when nothing else uses the runner any more.
        """
        from models.cpu.runner import CpuRunner
        from models.cpu.sampling_abi import empty_output, sampling_view

        batch, runner = self._widest, self._runner
        if batch is None or not isinstance(runner, CpuRunner):
            return None
        logits = runner.logits(batch)
        view = sampling_view(batch.sampling, self.config.vocab_size)
        kept, output = empty_output(len(logits), batch.sampling.num_logprobs)
        seconds = []
        for _ in range(5):
            began = time.perf_counter()
            runner.library.octavo_sample(ctypes.c_void_p(logits.ctypes.data), ctypes.byref(view), ctypes.byref(output))
            seconds.append(time.perf_counter() - began)
        del kept
        return min(seconds) / len(logits) / min(threads, len(logits))
