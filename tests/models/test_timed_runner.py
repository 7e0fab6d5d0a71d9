"""A timed runner does what it did, and the times of its steps are known."""

from __future__ import annotations

import time
from typing import cast

import numpy as np

from models.base import Batch, Runner, StepOutput
from models.config import ModelConfig, RopeConfig
from models.plain_batch import plain_batch
from models.timed_runner import Timing


class Slow:
    config = ModelConfig("none", 9, 1, 1, 1, 1, 1, 1, 64, 1e-5, RopeConfig(1e4), True, windows=(None,))

    def run(self, batch: Batch) -> StepOutput:
        time.sleep(0.02)
        return StepOutput(np.full(len(batch.logit_rows), 5, np.int32), None, None, None)


def test_steps_are_run_and_timed_on_the_engines_clock() -> None:
    runner = cast("Runner", Slow())
    timing = Timing(runner)
    batch = plain_batch(np.zeros(4, np.int32), np.zeros((2, 1), np.int32), starts=[0, 0], counts=[3, 1])
    began = time.monotonic()
    assert runner.run(batch).tokens.tolist() == [5, 5]
    ended = time.monotonic()
    [call] = timing.calls
    assert began <= call[0] <= call[1] - 0.02 <= ended


def test_sampling_is_measured_only_where_the_native_sampler_is() -> None:
    runner = cast("Runner", Slow())
    timing = Timing(runner)
    assert timing.sampling_seconds_per_row(2) is None
    runner.run(plain_batch(np.zeros(1, np.int32), np.zeros((1, 1), np.int32), starts=[0], counts=[1]))
    assert timing.sampling_seconds_per_row(2) is None
