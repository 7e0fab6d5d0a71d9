"""When each step of a runner was computed, for profiling: a step as the model's own thread sees it.

Owner: as the runner. Costs two clock readings a step.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

from models.base import Batch, Runner, StartingRunner, StepOutput


class Timing:
    """Of a runner, whose own methods it takes the place of. `calls` are the beginnings and ends of steps, on
    `time.monotonic`, which is the engine's clock."""

    def __init__(self, runner: Runner) -> None:
        self.calls: list[tuple[float, float]] = []
        self._runner = runner
        self._widest: Batch | None = None  # the step with the most logit rows so far
        run = runner.run

        def timed_run(batch: Batch) -> StepOutput:
            began = time.monotonic()
            output = run(batch)
            self._note(batch, began)
            return output

        runner.run = timed_run  # type: ignore[method-assign]
        if isinstance(runner, StartingRunner):
            start = runner.start

            def timed_start(batch: Batch, descriptor: int) -> Callable[[], StepOutput]:
                began = time.monotonic()
                output = start(batch, descriptor)

                def done() -> StepOutput:
                    self._note(batch, began)
                    return output()

                return done

            runner.start = timed_start  # type: ignore[method-assign]

    def _note(self, batch: Batch, began: float) -> None:
        self.calls.append((began, time.monotonic()))
        if self._widest is None or len(batch.logit_rows) > len(self._widest.logit_rows):
            self._widest = batch

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
        view = sampling_view(batch.sampling, runner.config.vocab_size)
        kept, output = empty_output(len(logits), batch.sampling.num_logprobs)
        seconds = []
        for _ in range(5):
            began = time.perf_counter()
            runner.library.octavo_sample(ctypes.c_void_p(logits.ctypes.data), ctypes.byref(view), ctypes.byref(output))
            seconds.append(time.perf_counter() - began)
        del kept
        return min(seconds) / len(logits) / min(threads, len(logits))
