"""The contract of repeatability: a request's tokens, logprobs and finish reason are the same bits however it was run.

Every scenario runs some requests through the real engine, KV store and native kernels, mixed as chance has it: who else
is in the batch, how the prompt is chunked, what the prefix cache holds, how often it is preempted, on how many threads,
what is drafted ahead and in how many branches.
Each request is compared with the same request run alone, whole and uncached.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvstore.store import KVStore
from kvstore.tier import Costs, HostTier
from models.build import build_runner
from models.cpu.library import load_library
from models.cpu.runner import CpuRunner
from models.loading.checkpoint import open_checkpoint
from models.loading.source import resolve_source
from models.sampling import SamplingParams
from models.sampling_state import SamplingState
from scheduler.engine import Engine
from scheduler.limits import Limits
from scheduler.proposers.base import Ask, Draft, Proposer, Verified
from scheduler.request import Request, Sequence
from scheduler.speculation import Speculation

PAGE, PAGES, CONTEXT, VOCABULARY = 16, 1200, 512, 384
FORMATS = ["float32", "bfloat16", "int8", "int4", "int4 without tiles", "bfloat16 without tiles"]
SCENARIOS = 90  # of each format
Answer = tuple[tuple[int, ...], tuple[float, ...], str | None]


@dataclass(frozen=True)
class Conditions:
    """How an engine is run."""

    budget: int = 2048
    prefix_caching: bool = False
    pages: int = PAGES
    seats: int = 64
    slots: int = 0  # of a second tier
    policy: Literal["fcfs", "prefix"] = "fcfs"
    branches: int = 0  # of drafts; 0 drafts nothing


class Knowing:
    """A proposer that has heard every answer, and repeats it with mistakes."""

    name = "knowing"
    runs_model = False

    def __init__(self, rng: random.Random, alone: dict[str, list[Answer]]) -> None:
        self.rng, self.alone, self.accepted, self.branched = rng, alone, 0, 0

    def seconds(self, sequences: int) -> float:
        return 0.0

    def propose(self, asks: list[Ask]) -> list[Draft]:
        return [self._propose(ask) for ask in asks]

    def _propose(self, ask: Ask) -> Draft:
        sequence = ask.sequence
        said = self.alone[sequence.request.id][sequence.index][0][sequence.known - sequence.prompt_length :]
        coming = [*said, *([9] * ask.tokens)][: self.rng.randint(1, ask.tokens)]
        paths = [[t if self.rng.random() < 0.85 else 11 for t in coming] for _ in range(ask.branches)]
        return Draft([np.array(path, np.int32) for path in {tuple(path): None for path in paths}])

    def observe(self, verified: list[Verified]) -> None:
        self.accepted += sum(seen.accepted for seen in verified)
        self.branched += sum(len(seen.draft.paths) > 1 for seen in verified)

    def forget(self, sequence: Sequence) -> None: ...

    def reset(self) -> None: ...


class Sometimes(Costs):
    """Has pages moved between the tiers by chance, whatever the machine is busy with."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def pays(self, page_size: int, *, both_ways: bool) -> bool:
        return self._rng.random() < 0.8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small random model whose logits are spread enough for sampling to matter."""
    torch.manual_seed(1)
    shape = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(shape)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.dim() == 2 else 1)
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=FORMATS)
def runners(request: pytest.FixtureRequest, folder: Any) -> Iterator[dict[int, CpuRunner]]:
    """The model in one weights format, by the number of threads that compute."""
    made = {}
    kind, *without_tiles = request.param.split(" without ")
    load_library().octavo_tiles(not without_tiles)  # where the processor has them
    for threads in (1, 2, 3):
        runner = build_runner(
            open_checkpoint(resolve_source(str(folder))), device="cpu",
            dtype="float32" if kind == "float32" else "bfloat16",
            quantization="none" if kind in ("float32", "bfloat16") else kind,
            kv_dtype={"float32": "float32", "int4": "int8"}.get(kind, "bfloat16"), attention_backend="cpu",
            threads=threads, max_model_len=CONTEXT,
        )  # fmt: skip
        assert isinstance(runner, CpuRunner)
        runner.allocate(PAGES, PAGE)
        made[threads] = runner
    yield made
    load_library().octavo_tiles(True)


def engine(runner: CpuRunner, conditions: Conditions, proposer: Proposer | None = None) -> Engine:
    limits = Limits(
        max_model_len=CONTEXT,
        max_num_seqs=conditions.seats,
        max_num_batched_tokens=max(conditions.budget, conditions.seats),
        prefix_caching=conditions.prefix_caching,
        policy=conditions.policy,
    )
    memory = np.zeros((conditions.slots, runner.page_bytes(PAGE)), np.uint8)
    store = KVStore(
        num_pages=conditions.pages, page_size=PAGE, max_sequences=conditions.seats * max(1, conditions.branches),
        max_model_len=CONTEXT, prefix_caching=conditions.prefix_caching,
        tier=HostTier(memory, PAGE) if conditions.slots else None,
    )  # fmt: skip
    speculation = None
    if proposer is not None:
        speculation = Speculation(proposer, lambda rows: 1.0, tokens=7, branches=conditions.branches)
    return Engine(runner, store, SamplingState(conditions.seats, VOCABULARY, (2,)), limits, speculation=speculation)


async def read(running: Engine, request: Request) -> list[Answer]:
    """Every choice of a request."""
    [stream] = running.submit([request])
    tokens: list[list[int]] = [[] for _ in range(request.n)]
    logprobs: list[list[float]] = [[] for _ in range(request.n)]
    reasons: list[str | None] = [None] * request.n
    async for update in stream:
        assert update.error is None, update.error
        tokens[update.index] += [*update.tokens, *([update.stop_token] if update.stop_token is not None else [])]
        for entry in update.logprobs or ():
            logprobs[update.index] += [entry.logprob, *(value for _, value in entry.top)]
        reasons[update.index] = update.finish_reason or reasons[update.index]
    return [(tuple(t), tuple(p), r) for t, p, r in zip(tokens, logprobs, reasons, strict=True)]


def requests() -> list[Request]:
    """Prompts that share prefixes and that do not; greedy and sampled; with and without penalties and filters."""
    rng = random.Random(3)
    stems = [[rng.randrange(3, VOCABULARY) for _ in range(120)] for _ in range(3)]
    made = []
    for i in range(48):
        own = [rng.randrange(3, VOCABULARY) for _ in range(rng.choice([1, 2, 15, 16, 17, 40, 130]))]
        prompt = stems[i % 3][: rng.choice([15, 16, 17, 64, 120])] + own if i % 2 else own
        temperature = (0.0, 0.3, 1.0, 1.5)[i % 4]
        params = SamplingParams(
            seed=i - 5,
            temperature=temperature,
            top_p=rng.choice([1.0, 0.9]) if temperature else 1.0,
            top_k=rng.choice([0, 40]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.7]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            logprobs=rng.choice([0, 3]),
            max_tokens=rng.choice([2, 9, 20, 60]),
            min_tokens=rng.choice([0, 2]),
        )
        made.append(Request(str(i), np.array(prompt, np.int32), params, n=3 if i % 12 == 5 else 1))
    return made


REQUESTS = requests()


@pytest.fixture(scope="module")
def alone(runners: dict[int, CpuRunner]) -> dict[str, list[Answer]]:
    """Every request by itself: one thread, the whole prompt at once, no cache."""

    async def run() -> dict[str, list[Answer]]:
        answers = {}
        for request in REQUESTS:
            running = engine(runners[1], Conditions())
            running.start()
            answers[request.id] = await read(running, request)
            await running.stop()
        return answers

    return asyncio.run(run())


async def scenario(
    runner: CpuRunner, conditions: Conditions, rng: random.Random, alone: dict[str, list[Answer]]
) -> tuple[int, int, int, int]:
    """Some requests, arriving by chance, on a cold, warm or partly evicted cache.

    Returns the preemptions, the pages that came back from the second tier, drafted tokens that were right, and how
    many drafts had branches.
    """
    by_step = random.Random(rng.random())  # apart: how often it is asked depends on the machine
    proposer = Knowing(by_step, alone)
    running = engine(runner, conditions, proposer if conditions.branches else None)
    if running.kv.tier is not None:
        running.kv.tier.costs = Sometimes(by_step)
    running.start()
    for _ in range(rng.choice([1, 1, 2])):  # the second round finds what the first left in the cache
        chosen = rng.sample(REQUESTS, rng.choice([1, 2, 3, 5, 8, 16, 40]))

        async def later(request: Request, steps: int) -> tuple[Request, list[Answer]]:
            for _ in range(steps):
                await asyncio.sleep(0)
            return request, await read(running, request)

        for request, found in await asyncio.gather(*(later(r, rng.choice([0, 0, 3, 30])) for r in chosen)):
            assert found == alone[request.id], (conditions, request)
    running.kv.check_integrity()
    preempted = sum(record.preempted != () for record in running.journal.steps)
    await running.stop()
    loaded = 0 if running.kv.tier is None else running.kv.tier.counts["loaded"]
    return preempted, loaded, proposer.accepted, proposer.branched


@pytest.mark.case(3, 73, 76)
def test_answers_are_the_same_bits_in_random_scenarios(
    runners: dict[int, CpuRunner], alone: dict[str, list[Answer]], request: pytest.FixtureRequest
) -> None:
    rng = random.Random(11)
    seen = np.zeros(4, int)
    for _ in range(SCENARIOS):
        conditions = Conditions(
            budget=rng.choice([16, 17, 31, 64, 100, 256, 512, 2048]),
            prefix_caching=(caching := rng.random() < 0.7),
            pages=rng.choice([PAGES, 60, 28, 22, 22, 21, 21]),
            seats=rng.choice([64, 64, 8]),
            slots=rng.choice([0, 5, 400, 400]) if caching else 0,
            policy=rng.choice(["fcfs", "prefix"]),
            branches=rng.choice([0, 0, 1, 1, 3]),
        )
        seen += asyncio.run(scenario(runners[rng.choice([1, 2, 2, 3])], conditions, rng, alone))
    preempted, loaded, accepted, branched = seen
    assert loaded > 5
    assert accepted > 1000
    assert branched > 50
    assert preempted > 5  # or the small pools proved nothing
    assert len({answer[0] for answers in alone.values() for answer in answers}) > 40


def test_a_different_seed_is_a_different_answer(runners: dict[int, CpuRunner]) -> None:
    """What shows that the comparison can fail."""
    found = set()
    for seed in range(5):
        running = engine(runners[2], Conditions())

        async def run(running: Engine = running, seed: int = seed) -> None:
            running.start()
            params = SamplingParams(seed=seed, temperature=1.0, logprobs=0, max_tokens=12)
            found.add((await read(running, Request("x", np.array([5, 6, 7], np.int32), params)))[0])
            await running.stop()

        asyncio.run(run())
    assert len(found) == 5
