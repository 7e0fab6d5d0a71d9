"""A tiny deterministic model, a clock that stands still, and two ways to drive the scheduler with them.

The model's next token is a hash of everything it reads back through the page tables, so that any mistake in paging,
sharing, copying, preemption or sampling state changes the text. `expected` computes the same text without any of it.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.store import KVStore
from kvstore.tier import HostTier
from models.base import U8, Batch, StepOutput
from models.config import ModelConfig, RopeConfig
from models.sampling import IN_PROMPT, SamplingParams
from models.sampling_state import SamplingState
from scheduler.apply import apply
from scheduler.batch import build
from scheduler.engine import Engine
from scheduler.errors import ConstraintFailed
from scheduler.journal import Journal, StepRecord
from scheduler.limits import Limits
from scheduler.plan import StepPlan, plan
from scheduler.proposers.base import Ask, Draft, Proposer, Verified
from scheduler.recording import Recorder
from scheduler.request import Request, Sequence, derive_seed
from scheduler.requests import Requests
from scheduler.speculation import Speculation
from scheduler.state import State
from scheduler.stream import RequestStream, TokenLogprob, Update

VOCAB = 61
EOS = 7
MASK = (1 << 64) - 1


def mix(x: int) -> int:
    x &= MASK
    x = ((x ^ (x >> 31)) * 0x7FB5D329728EA185) & MASK
    return x ^ (x >> 29)


def choose(state: int, seed: int, position: int, counts: int) -> int:
    return mix(state + 3 * mix(seed) + 5 * mix(position) + 7 * mix(counts)) % VOCAB


def nearest(token: int, allowed: set[int]) -> int:
    """The first allowed token from `token` on, around the end; -1 when there is none."""
    return next(((token + i) % VOCAB for i in range(VOCAB) if (token + i) % VOCAB in allowed), -1)


def bits_of(mask: np.ndarray) -> set[int]:
    return {token for token in range(VOCAB) if int(mask[token // 32]) >> token % 32 & 1}


class Rule:
    """A constraint: what may come next depends on the sum of the tokens so far; all is said after `length` of them.

    `tells` says when it knows that nothing may follow: with the last token, only when asked for more, or never, so that
    an eos token has to end the text.
    """

    def __init__(self, length: int, tells: str = "at once") -> None:
        self.length, self.tells = length, tells
        self.tokens: list[int] = []
        self.finished = False
        self.broken_after: int | None = None

    def allowed(self) -> set[int]:
        if len(self.tokens) >= self.length:
            return {EOS}
        return {token for token in range(VOCAB) if (token + sum(self.tokens)) % 3 == 0 and token != EOS}

    def fill(self, allowed: np.ndarray) -> None:
        if self.broken_after is not None and len(self.tokens) >= self.broken_after:
            raise ConstraintFailed("too costly")
        allowed[:] = 0
        for token in self.allowed():
            allowed[token // 32] |= np.uint32(1 << token % 32)
        self.finished = self.tells == "when asked" and len(self.tokens) >= self.length

    def accept(self, token: int) -> None:
        assert token in self.allowed()
        self.tokens.append(token)
        self.finished = self.tells == "at once" and len(self.tokens) >= self.length

    def fork(self) -> Rule:
        copy = Rule(self.length, self.tells)
        copy.tokens, copy.broken_after = list(self.tokens), self.broken_after
        return copy


def logprob_of(state: int, token: int) -> float:
    return float(np.float32(-(mix(state + token) % 1000 + 1) / 100))


def tops(state: int, k: int) -> list[tuple[int, float]]:
    return [((state + i) % VOCAB, float(np.float32(-(i + 1) / 8))) for i in range(k)]


POWERS = np.array([pow(1_000_003, i, 1 << 64) for i in range(8192)], dtype=np.uint64)


def keys(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B1) + positions.astype(np.uint64) * np.uint64(
        31
    )


def digest(run: np.ndarray) -> int:
    return int((run * POWERS[: len(run)]).sum(dtype=np.uint64))


def count_digest(row: np.ndarray) -> int:
    return int((row.astype(np.int64) * np.arange(1, len(row) + 1)).sum()) & MASK


class FakeRunner:
    """Memory of one number per slot, and a hash for a model."""

    def __init__(self) -> None:
        self.config = ModelConfig(
            "fake", VOCAB, 1, 1, 1, 1, 1, 1, 8192, 1e-5, RopeConfig(1e4), True, windows=(None,), eos_token_ids=(EOS,)
        )
        self.computed: Counter[int] = Counter()  # rows by token id
        self.rows = 0
        self.steps = 0
        self.before: Callable[[Batch], None] = lambda batch: None
        self.broken_token: int | None = None  # a sequence that holds it has logits that are not finite

    def page_bytes(self, page_size: int) -> int:
        return page_size

    def allocate(self, num_pages: int, page_size: int) -> None:
        self.memory = np.full((num_pages, page_size), 0xDEAD, np.uint64)
        self.tokens = np.full((num_pages, page_size), -1, np.int64)

    def read_page(self, page: int, out: U8) -> None:
        out[:] = np.concatenate((self.memory[page].view(np.uint8), self.tokens[page].view(np.uint8)))

    def write_page(self, page: int, data: U8) -> None:
        half = len(data) // 2
        self.memory[page], self.tokens[page] = data[:half].view(np.uint64), data[half:].view(np.int64)

    def run(self, batch: Batch) -> StepOutput:
        self.before(batch)
        self.steps += 1
        self.rows += len(batch.token_ids)
        self.computed.update(batch.token_ids.tolist())
        page_size = self.memory.shape[1]
        (table,) = batch.page_tables
        (copies,) = batch.copies
        assert table.flags.c_contiguous
        assert len(batch.token_ids) == len(batch.positions) == batch.query_starts[-1]
        for memory in (self.memory, self.tokens):
            memory[copies[:, 1]] = memory[copies[:, 0]]
        self._check_written_pages(batch, table)
        for s, length in enumerate(batch.lengths.tolist()):
            rows = slice(batch.query_starts[s], batch.query_starts[s + 1])
            n = rows.stop - rows.start
            assert n > 0
            slots = np.arange(length - n, length)
            pages = table[s, slots // page_size]
            self.memory[pages, slots % page_size] = keys(batch.token_ids[rows], batch.positions[rows])
            self.tokens[pages, slots % page_size] = batch.token_ids[rows]
        return self._read(batch, table, page_size)

    def _check_written_pages(self, batch: Batch, table: np.ndarray) -> None:
        """A page that this step writes is read by nobody but its writer."""
        page_size = self.memory.shape[1]
        written, seen = set(), Counter[int]()
        for s, length in enumerate(batch.lengths.tolist()):
            n = int(batch.query_starts[s + 1] - batch.query_starts[s])
            held = table[s, : -(-length // page_size)].tolist()
            seen.update(held)
            written.update(held[(length - n) // page_size :])
        assert all(seen[page] == 1 for page in written)

    def _read(self, batch: Batch, table: np.ndarray, page_size: int) -> StepOutput:
        sampling = batch.sampling
        count, k = len(batch.logit_rows), max(0, sampling.num_logprobs)
        tokens = np.zeros(count, np.int32)
        logprobs, top_ids = np.zeros(count, np.float32), np.zeros((count, k), np.int32)
        top_logprobs = np.zeros((count, k), np.float32)
        for i, row in enumerate(batch.logit_rows.tolist()):
            s = int(np.searchsorted(batch.query_starts, row, side="right")) - 1
            slots = np.arange(int(batch.lengths[s]) - (int(batch.query_starts[s + 1]) - row) + 1)
            pages = table[s, slots // page_size]
            state = digest(self.memory[pages, slots % page_size])
            assert sampling.position[i] == len(slots)
            if sampling.target[i] >= 0:
                token = int(sampling.target[i])
            else:
                seed = int(sampling.seed[i]) if sampling.temperature[i] else 0
                counts = 0
                if sampling.counts is not None and sampling.count_row[i] >= 0:
                    counts = count_digest(sampling.counts[sampling.count_row[i]])
                token = choose(state, seed, len(slots), counts)
                if sampling.mask is not None and sampling.mask_row is not None and sampling.mask_row[i] >= 0:
                    token = nearest(token, bits_of(sampling.mask[sampling.mask_row[i]]))
                if self.broken_token is not None and (self.tokens[pages, slots % page_size] == self.broken_token).any():
                    token = -1
            tokens[i], logprobs[i] = token, logprob_of(state, token)
            for j, (top, logprob) in enumerate(tops(state, k)):
                top_ids[i, j], top_logprobs[i, j] = top, logprob
        if sampling.num_logprobs < 0:
            return StepOutput(tokens, None, None, None)
        return StepOutput(tokens, logprobs, top_ids, top_logprobs)


@dataclass
class Answer:
    """What one choice came to."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_token: int | None = None
    cached_tokens: int = 0
    error: Exception | None = None

    def add(self, update: Update) -> None:
        assert self.finish_reason is None, "an update after the last"
        self.tokens += update.tokens
        if update.logprobs:
            assert len(update.logprobs) == len(update.tokens)
            self.logprobs = (self.logprobs or []) + list(update.logprobs)
        self.prompt_logprobs += update.prompt_logprobs
        self.finish_reason, self.stop_token = update.finish_reason, update.stop_token
        self.cached_tokens, self.error = update.cached_tokens, update.error

    @property
    def text(self) -> tuple[Any, ...]:
        """All that may not depend on neighbours, pages or caches."""
        return self.tokens, self.logprobs, self.prompt_logprobs, self.finish_reason, self.stop_token


def expected(request: Request, index: int = 0, context_limit: int = 8192) -> Answer:
    """The answer by the model's definition alone."""
    params, prompt = request.params, request.prompt.tolist()
    answer, tokens = Answer(), list(prompt)

    def state(length: int) -> int:
        return digest(keys(np.array(tokens[:length]), np.arange(length)))

    def scored(length: int, token: int, k: int) -> TokenLogprob:
        return TokenLogprob(logprob_of(state(length), token), tuple(tops(state(length), k)))

    if params.prompt_logprobs is not None and index == 0:
        answer.prompt_logprobs = [scored(i, prompt[i], params.prompt_logprobs) for i in range(1, len(prompt))]
    stops = {*params.stop_token_ids} | (set() if params.ignore_eos else {EOS})
    penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
    answer.finish_reason = "length"
    limit = min(len(prompt) + params.max_tokens, context_limit)
    rule = None if request.constraint is None else request.constraint.fork()
    while len(tokens) < limit:
        counts = 0
        if penalised:
            row = np.bincount(tokens[len(prompt) :], minlength=VOCAB)
            row[prompt] |= IN_PROMPT
            counts = count_digest(row)
        seed = derive_seed(params.seed, index) if params.temperature else 0
        token = choose(state(len(tokens)), seed, len(tokens), counts)
        if isinstance(rule, Rule):
            if rule.tells == "when asked" and len(rule.tokens) >= rule.length:
                answer.finish_reason = "stop"
                break
            token = nearest(token, rule.allowed())
        if token in stops and len(tokens) - len(prompt) >= params.min_tokens:
            answer.finish_reason, answer.stop_token = "stop", token
            break
        if params.logprobs is not None:
            answer.logprobs = [*(answer.logprobs or []), scored(len(tokens), token, params.logprobs)]
        answer.tokens.append(token)
        tokens.append(token)
        if rule is not None:
            rule.accept(token)
            if rule.finished:
                answer.finish_reason = "stop"
                break
    return answer


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0
        self.reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return self.now


async def read(stream: RequestStream) -> dict[int, Answer]:
    """Everything a stream gives, by choice."""
    answers: dict[int, Answer] = {}
    async for update in stream:
        answers.setdefault(update.index, Answer()).add(update)
    return answers


class Oracle:
    """A proposer that knows what comes, and says it as often as it pleases `rng`; in several paths where asked."""

    name = "oracle"
    runs_model = False

    def __init__(self, rng: random.Random, right: float = 0.8) -> None:
        self.rng, self.right = rng, right
        self.seen: list[Verified] = []
        self.texts: dict[Sequence, list[int]] = {}

    def seconds(self, sequences: int) -> float:
        return 0.0

    def propose(self, asks: list[Ask]) -> list[Draft]:
        return [self._propose(ask) for ask in asks]

    def _propose(self, ask: Ask) -> Draft:
        sequence = ask.sequence
        if sequence not in self.texts:
            answer = expected(sequence.request, sequence.index)
            self.texts[sequence] = answer.tokens + ([] if answer.stop_token is None else [answer.stop_token])
        coming = self.texts[sequence][sequence.known - sequence.prompt_length :] + [1] * ask.tokens
        paths = {self._guess(coming[: self.rng.randint(1, ask.tokens)]): None for _ in range(ask.branches)}
        return Draft([np.array(path, np.int32) for path in paths if self.rng.random() < 0.9])

    def _guess(self, tokens: list[int]) -> tuple[int, ...]:
        return tuple(token if self.rng.random() < self.right else self.rng.randrange(VOCAB) for token in tokens)

    def observe(self, verified: list[Verified]) -> None:
        self.seen += verified

    def forget(self, sequence: Sequence) -> None:
        self.texts.pop(sequence, None)

    def reset(self) -> None: ...


class Bench:
    """The scheduler without its engine: steps run when the test says so, and integrity is checked after each."""

    def __init__(
        self,
        *,
        num_pages: int = 256,
        page_size: int = 4,
        max_sequences: int | None = None,
        slots: int = 0,
        proposer: Proposer | None = None,
        branches: int = 1,
        **limits: Any,
    ) -> None:
        self.speculation = None
        if proposer is not None:
            self.speculation = Speculation(proposer, lambda rows: 1 + rows / 64, tokens=5, branches=branches)
        self.limits = Limits(**{"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 64} | limits)
        self.kv = KVStore(
            num_pages=num_pages,
            page_size=page_size,
            max_sequences=max_sequences or self.limits.max_num_seqs * branches,
            max_model_len=self.limits.max_model_len,
            prefix_caching=self.limits.prefix_caching,
            tier=HostTier(np.zeros((slots, 16 * page_size), np.uint8), page_size) if slots else None,
        )
        self.sampling = SamplingState(self.limits.max_num_seqs, VOCAB, (EOS,))
        self.runner = FakeRunner()
        self.runner.allocate(num_pages, page_size)
        self.clock = FakeClock()
        self.state = State(self.kv, self.sampling, self.limits)
        if proposer is not None:
            self.state.on_leave = proposer.forget
        self.journal = Journal(64, 64)
        self.requests = Requests(self.state, self.journal, self.clock, (EOS,))
        self.streams: dict[str, RequestStream] = {}
        self.plans: list[StepPlan] = []
        self._answers: dict[str, dict[int, Answer]] = {}

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.streams[request.id] = self.requests.open(request)

    def step(self, budget: int | None = None) -> StepPlan:
        """Plan, run and apply one step."""
        planned = plan(self.state, budget or self.limits.max_num_batched_tokens)
        self.plans.append(planned)
        for sequence, error in planned.failed:
            raise AssertionError(f"{sequence}: {error}")
        if planned.sequences:
            if self.speculation is not None:
                asks = self.speculation.allot(self.state, planned)
                planned.drafts = self.speculation.take(self.state, asks, self.speculation.proposer.propose(asks))
            step = build(planned, self.state)
            assert len(step.batch.token_ids) <= (budget or self.limits.max_num_batched_tokens)
            assert len(planned.sequences) <= self.limits.max_num_seqs
            self.requests.step_in_flight = True
            if step.masks is not None:
                step.masks.fill()
            if step.moves is not None and self.kv.tier is not None:
                self.kv.tier.move(step.moves, self.runner)
            output = self.runner.run(step.batch)
            self.requests.step_in_flight = False
            apply(step, output, self.state, self.requests, self.clock())
            if self.speculation is not None:
                self.speculation.verified(planned.drafts, step.accepted, output)
        self.kv.check_integrity()
        return planned

    def run(self, steps: int = 2000, budget: Callable[[], int] | None = None) -> int:
        """Step until every request has ended; how many steps it took."""
        for count in range(steps):
            if not len(self.requests):
                return count
            self.step(budget() if budget else None)
        raise AssertionError(f"not done after {steps} steps: {self.state.running} {self.state.waiting}")

    def answers(self, request_id: str) -> dict[int, Answer]:
        """Of a request that has ended."""
        if request_id not in self._answers:
            self._answers[request_id] = asyncio.run(read(self.streams[request_id]))
        return self._answers[request_id]

    def assert_baseline(self) -> None:
        """Nothing is held by anyone any more."""
        stats = self.kv.stats()
        assert (stats.used, stats.sequences) == (0, 0)
        assert (self.state.num_running, self.state.num_waiting) == (0, 0)
        assert sorted(self.state.free_slots) == list(range(self.limits.max_num_seqs))


class EngineBench:
    """A running engine over the fake model. `hold()` keeps steps from ending until `release()`."""

    def __init__(
        self, *, num_pages: int = 256, page_size: int = 4, slots: int = 0, journal: Path | None = None, **options: Any
    ) -> None:
        bench = Bench(num_pages=num_pages, page_size=page_size, slots=slots, **options)
        self.kv, self.runner, self.clock, self.limits = bench.kv, bench.runner, bench.clock, bench.limits
        self.records: list[StepRecord] = []
        self.engine = Engine(
            self.runner,
            self.kv,
            bench.sampling,
            self.limits,
            clock=self.clock,
            on_step=self.records.append,
            recorder=None if journal is None else Recorder(journal, self.kv, self.limits),
            speculation=bench.speculation,
        )
        self._door = threading.Condition()
        self._shut = self._blocked = False
        self.runner.before = self._pass

    def _pass(self, batch: Batch) -> None:
        with self._door:
            self._blocked = self._shut
            self._door.notify_all()
            assert self._door.wait_for(lambda: not self._shut, 10)
            self._blocked = False

    def hold(self) -> None:
        with self._door:
            self._shut = True

    def release(self) -> None:
        with self._door:
            self._shut = False
            self._door.notify_all()

    async def in_step(self) -> None:
        """Until a step is being held."""

        def wait() -> bool:
            with self._door:
                return self._door.wait_for(lambda: self._blocked, 10)

        assert await asyncio.to_thread(wait)

    def assert_baseline(self) -> None:
        self.kv.check_integrity()
        assert self.kv.stats().used == 0
        assert (self.engine.running, self.engine.waiting) == (0, 0)


def make_request(request_id: str, prompt: Iterable[int], **options: Any) -> Request:
    """Keyword arguments of Request, and of SamplingParams for the rest."""
    names = ("n", "priority", "namespace", "owner", "arrival", "constraint")
    fields = {name: options.pop(name) for name in names if name in options}
    params = SamplingParams(**{"seed": 1, "max_tokens": 8, "ignore_eos": True} | options)
    return Request(request_id, np.array(list(prompt), np.int32), params, **fields)


def run_engine(test: Callable[[EngineBench], Awaitable[None]], seconds: float = 20, **options: Any) -> None:
    """Run a test against an engine, and stop the engine."""

    async def main() -> None:
        bench = EngineBench(**options)
        bench.engine.start()
        try:
            await asyncio.wait_for(test(bench), seconds)
        finally:
            bench.release()
            await bench.engine.stop()

    asyncio.run(main())


@dataclass(frozen=True)
class Tools:
    """What the tests of this room need, without importing from each other."""

    Bench = Bench
    request = staticmethod(make_request)
    expected = staticmethod(expected)
    read = staticmethod(read)
    run_engine = staticmethod(run_engine)
    FakeClock = FakeClock
    Rule = Rule
    Oracle = Oracle
    EOS = EOS
    VOCAB = VOCAB


@pytest.fixture(scope="session")
def tools() -> Tools:
    return Tools()
