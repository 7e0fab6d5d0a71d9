"""What the scheduler costs for each token, by how many requests run: a whole engine over a model that does nothing.

    python -m scheduler.scaling

prints one JSON object. The KV store, the sampling state, the journal and the streams with their readers are real; the
model returns at once, so that all of the time is the scheduler's. Let nothing else run beside it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvstore.store import KVStore
from models.base import Batch, StepOutput
from models.config import ModelConfig, RopeConfig
from models.sampling import SamplingParams
from models.sampling_state import SamplingState
from scheduler.engine import Engine
from scheduler.journal import StepRecord
from scheduler.limits import Limits
from scheduler.request import Request
from scheduler.stream import RequestStream

RUNNING = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 96
PAGE_SIZE = 16
VOCAB = 49152


@dataclass(frozen=True, slots=True)
class Point:
    """Microseconds for each token, medians over the steps in which every request decodes."""

    running: int
    steps: int
    plan: float  # planning and building the batch
    apply: float
    other: float  # the way to the model's thread and back, the journal, and waking the readers


class NoModel:
    """A runner that takes no time: every token is 0."""

    def __init__(self) -> None:
        self.config = ModelConfig(
            "none", VOCAB, 1, 1, 1, 1, 1, 1, 1 << 20, 1e-5, RopeConfig(1e4), True, windows=(None,)
        )

    def page_bytes(self, page_size: int) -> int:
        return page_size

    def allocate(self, *_: Any, **__: Any) -> None:
        pass

    read_page = write_page = allocate

    def run(self, batch: Batch) -> StepOutput:
        return StepOutput(np.zeros(len(batch.logit_rows), np.int32), None, None, None)


def measure(running: int, outputs: int = OUTPUT_TOKENS) -> Point:
    """Let so many requests decode together from beginning to end."""
    records: list[StepRecord] = []
    asyncio.run(_serve(running, outputs, records))
    full = [record for record in records if record.decode_rows == running and not record.prefill_tokens]
    follows = {record.number: later.time for record, later in itertools.pairwise(records)}
    took = [(follows[r.number] - r.time - r.plan_seconds - r.apply_seconds, r) for r in full if r.number in follows]

    def each(seconds: Sequence[float]) -> float:
        return statistics.median(seconds) / running * 1e6

    return Point(
        running,
        len(took),
        each([record.plan_seconds for _, record in took]),
        each([record.apply_seconds for _, record in took]),
        each([other for other, _ in took]),
    )


async def _serve(running: int, outputs: int, records: list[StepRecord]) -> None:
    length = PROMPT_TOKENS + outputs
    store = KVStore(
        num_pages=(running + 1) * (length // PAGE_SIZE + 2),
        page_size=PAGE_SIZE,
        max_sequences=running,
        max_model_len=length,
    )
    limits = Limits(max_model_len=length, max_num_seqs=running, max_num_batched_tokens=running * PROMPT_TOKENS)
    engine = Engine(NoModel(), store, SamplingState(running, VOCAB, ()), limits, on_step=records.append)
    random = np.random.default_rng(0)
    params = SamplingParams(seed=0, temperature=0.0, max_tokens=outputs, ignore_eos=True)
    engine.start()
    streams = engine.submit(
        Request(str(index), random.integers(0, VOCAB, PROMPT_TOKENS, np.int32), params) for index in range(running)
    )
    await asyncio.gather(*(_read(stream) for stream in streams))
    await engine.stop()


async def _read(stream: RequestStream) -> None:
    async for _ in stream:
        pass


def main() -> int:
    """Measure and print."""
    measure(8)  # warms the interpreter's caches
    print(json.dumps({"scheduler": [asdict(measure(running)) for running in RUNNING]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
