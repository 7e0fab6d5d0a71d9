"""Drafting with a model, on small random models: what is drafted, and what happens to everyone's pages meanwhile.

Steps run by hand: the target without drafts, so that its text is what a draft is compared with.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvstore.store import KVStore
from models.build import build_runner
from models.cpu.runner import CpuRunner
from models.loading.checkpoint import open_checkpoint
from models.loading.source import resolve_source
from models.loading.tokenizer import load_tokenizer
from models.sampling_state import SamplingState
from scheduler.apply import apply
from scheduler.batch import build
from scheduler.engine import Engine
from scheduler.journal import Journal
from scheduler.limits import Limits
from scheduler.plan import plan
from scheduler.proposers.base import Ask, Draft
from scheduler.proposers.model import ModelProposer
from scheduler.proposers.model_pages import OwnPages, TargetPages
from scheduler.request import Request, Sequence
from scheduler.requests import Requests
from scheduler.speculation import Speculation
from scheduler.state import State

PAGE, PAGES, CONTEXT, VOCABULARY, EOS, BUDGET = 16, 120, 512, 384, 2, 512
STEM = list(range(10, 110))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models of one vocabulary that agree about nothing."""
    made = {}
    for seed, (name, hidden) in enumerate({"target": 96, "other": 64}.items()):
        torch.manual_seed(seed)
        shape = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=CONTEXT,
        )  # fmt: skip
        model = LlamaForCausalLM(shape)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(4 if weight.dim() == 2 else 1)
        made[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(made[name])
    return made


@pytest.fixture(scope="module")
def load(folders: dict[str, Path]) -> Callable[..., CpuRunner]:
    def load(name: str, quantization: str = "none") -> CpuRunner:
        runner = build_runner(
            open_checkpoint(resolve_source(str(folders[name]))), device="cpu", dtype="bfloat16",
            quantization=quantization, kv_dtype="bfloat16", attention_backend="cpu", threads=2, max_model_len=CONTEXT,
        )  # fmt: skip
        assert isinstance(runner, CpuRunner)
        return runner

    return load


class Desk:
    """A target that takes its steps when the test says so."""

    def __init__(self, runner: CpuRunner, **limits: Any) -> None:
        runner.allocate(PAGES, PAGE)
        self.runner = runner
        self.limits = Limits(**{"max_model_len": CONTEXT, "max_num_seqs": 8, "max_num_batched_tokens": 256} | limits)
        self.kv = KVStore(num_pages=PAGES, page_size=PAGE, max_sequences=16, max_model_len=CONTEXT)
        self.sampling = SamplingState(8, runner.config.vocab_size, (EOS,))
        self.state = State(self.kv, self.sampling, self.limits)
        self.requests = Requests(self.state, Journal(8, 8), time.monotonic, (EOS,))

    def open(self, request: Request) -> Sequence:
        """A sequence of this request with its first token."""
        self.requests.open(request)
        sequence = self.requests[request.id].choices[0]
        while sequence.known == sequence.prompt_length:
            self.step()
        return sequence

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            planned = plan(self.state, self.limits.max_num_batched_tokens)
            if planned.sequences:
                step = build(planned, self.state)
                if step.masks is not None:
                    step.masks.fill()
                apply(step, self.runner.run(step.batch), self.state, self.requests, 0.0)
            self.kv.check_integrity()

    def settled_pages(self) -> list[bytes]:
        """What is in all pages but those in which running sequences write next."""
        open_pages: set[int] = set()
        for sequence in self.state.running:
            assert sequence.kv is not None
            row = self.kv.tables.rows[0][sequence.kv.slot]
            open_pages |= set(row[sequence.computed // PAGE : sequence.kv.blocks[0]].tolist())
        out = np.empty(self.runner.page_bytes(PAGE), np.uint8)
        found = []
        for page in sorted(set(range(PAGES)) - open_pages):
            self.runner.read_page(page, out)
            found.append(out.tobytes())
        return found

    def ask(self, sequence: Sequence, tokens: int, branches: int = 1) -> Ask:
        assert sequence.kv is not None
        assert self.kv.reserve(sequence.kv, sequence.computed + 1 + tokens)
        return Ask(sequence, tokens, branches)


def drafter(
    desk: Desk, runner: CpuRunner, *, pages: int = PAGES, budget: int = BUDGET, **options: Any
) -> ModelProposer:
    runner.allocate(pages, PAGE)
    store = KVStore(num_pages=pages, page_size=PAGE, max_sequences=32, max_model_len=CONTEXT)
    return ModelProposer("draft_model", runner, OwnPages(store), desk.sampling, budget=budget, **options)


def store_of(proposer: ModelProposer) -> KVStore:
    return proposer._pages.store


def texts(draft: Draft) -> list[list[int]]:
    return [path.tolist() for path in draft.paths]


WAYS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 5},
    "filtered": {"temperature": 1.5, "top_p": 0.9, "min_p": 0.01, "top_k": 50},
    "penalised": {"temperature": 0.8, "frequency_penalty": 1.5, "presence_penalty": 0.7, "repetition_penalty": 1.4},
    "biased until enough": {"logit_bias": ((2, 9.0), (77, 8.0)), "min_tokens": 6, "ignore_eos": False, "logprobs": 2},
    "without bad words": {"temperature": 0.0, "bad_words": ((3, 4), *((5, t) for t in range(300)))},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_drafter_of_the_same_weights_is_always_right(load: Callable[..., CpuRunner], tools: Any, way: str) -> None:
    desk = Desk(load("target"))
    proposer = drafter(desk, load("target"))
    a = desk.open(tools.request("a", STEM, max_tokens=60, **WAYS[way]))
    b = desk.open(tools.request("b", STEM[:31], max_tokens=60, **WAYS[way]))
    drafted = 0
    for tokens in (1, 4, 7, 3):
        running = [sequence for sequence in (b, a) if sequence.kv is not None]
        drafts = proposer.propose([desk.ask(sequence, tokens) for sequence in running])
        befores = [sequence.known for sequence in running]
        desk.step(tokens + 1)
        for sequence, draft, before in zip(running, drafts, befores, strict=True):
            [path] = texts(draft)
            drafted += len(path)
            assert path == sequence.tokens[before : before + len(path)].tolist()
            assert len(path) == tokens or path[-1] == EOS
        store_of(proposer).check_integrity()
    assert drafted >= 10
    for sequence in (a, b):
        proposer.forget(sequence)
    assert store_of(proposer).stats().used == 0


def test_a_constrained_draft_follows_its_grammar_on_a_copy(load: Callable[..., CpuRunner], tools: Any) -> None:
    desk = Desk(load("target"))
    proposer = drafter(desk, load("target"))
    rule = tools.Rule(9)
    a = desk.open(tools.request("a", STEM, max_tokens=60, constraint=rule, temperature=1.0))
    [draft] = proposer.propose([desk.ask(a, 6, branches=3)])
    seen, before = list(a.constraint.tokens), a.known
    assert len(draft.paths[0]) == 6
    for path in texts(draft):
        own = a.constraint.fork()
        for token in path:
            own.accept(token)  # asserts that it may
    assert a.constraint.tokens == seen
    desk.step(6)
    assert a.tokens[before:].tolist() == texts(draft)[0]
    [draft] = proposer.propose([desk.ask(a, 8)])
    assert len(draft.paths[0]) == 2  # all is said then
    a.constraint.broken_after = 8
    [draft] = proposer.propose([desk.ask(a, 8)])
    assert len(draft.paths[0]) == 1


def test_a_draft_ends_with_what_ends_the_text(load: Callable[..., CpuRunner], tools: Any) -> None:
    desk = Desk(load("target"))
    proposer = drafter(desk, load("target"))
    a = desk.open(tools.request("a", STEM, temperature=0.0, max_tokens=60))
    [draft] = proposer.propose([desk.ask(a, 6)])
    stop = texts(draft)[0][2]
    b = desk.open(tools.request("b", STEM, temperature=0.0, max_tokens=60, stop_token_ids=(stop,)))
    [stopped] = proposer.propose([desk.ask(b, 6)])
    assert texts(stopped)[0] == texts(draft)[0][: texts(draft)[0].index(stop) + 1]


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize(("name", "quantization"), [("target", "int4"), ("other", "none")])
def test_after_rejections_it_drafts_what_a_fresh_drafter_drafts(
    load: Callable[..., CpuRunner], tools: Any, name: str, quantization: str, branches: int
) -> None:
    desk = Desk(load("target"))
    proposer = drafter(desk, load(name, quantization))
    runner = load(name, quantization)
    sequences = [
        desk.open(tools.request(str(i), STEM[: 40 + 11 * i], temperature=0.7 * (i % 2), seed=i, max_tokens=60))
        for i in range(4)
    ]
    agreed = set()
    for turn in range(10):
        asks = [desk.ask(sequence, 2 + turn % 5, branches) for sequence in sequences]
        drafts = proposer.propose(asks)
        fresh = drafter(desk, runner).propose(asks)
        assert list(map(texts, drafts)) == list(map(texts, fresh))
        befores = [sequence.known for sequence in sequences]
        desk.step(1 + turn % 3)
        for sequence, before, draft in zip(sequences, befores, drafts, strict=True):
            said = sequence.tokens[before:].tolist()
            agreed.add(next((i for i, (x, y) in enumerate(zip(said, texts(draft)[0], strict=False)) if x != y), 9))
        store_of(proposer).check_integrity()
        if turn == 5:  # preempted: it finds in its tree what it had
            proposer.forget(sequences[0])
    assert len(agreed) > (name == "target")
    for sequence in sequences:
        proposer.forget(sequence)
    assert store_of(proposer).stats().used == 0


def test_it_catches_up_within_the_budget_and_drafts_when_it_has(load: Callable[..., CpuRunner], tools: Any) -> None:
    desk = Desk(load("target"))
    proposer = drafter(desk, load("target"), budget=64)
    a = desk.open(tools.request("a", range(200, 350), temperature=0.0))
    b = desk.open(tools.request("b", STEM[:20], temperature=0.0))
    rows: list[int] = []
    run = proposer._runner.run
    proposer._runner.run = lambda batch: rows.append(len(batch.token_ids)) or run(batch)  # type: ignore[method-assign]
    found = []
    for _ in range(4):
        drafts = proposer.propose([desk.ask(a, 3), desk.ask(b, 3)])
        found.append(tuple(len(draft.paths) for draft in drafts))
    assert found == [(0, 1), (0, 1), (1, 1), (1, 1)]
    assert max(rows) == 64
    before = a.known
    desk.step(3)
    assert texts(drafts[0]) == [a.tokens[before:].tolist()]


def test_a_shared_prefix_is_drafted_from_the_cache_but_not_across_namespaces(
    load: Callable[..., CpuRunner], tools: Any
) -> None:
    desk = Desk(load("target"))
    proposer = drafter(desk, load("target"))
    rows: list[int] = []
    run = proposer._runner.run
    proposer._runner.run = lambda batch: rows.append(len(batch.token_ids)) or run(batch)  # type: ignore[method-assign]
    counts = []
    for name, last, namespace in (("a", 7, None), ("b", 8, None), ("c", 9, "other")):
        sequence = desk.open(tools.request(name, [*STEM, last], temperature=0.0, namespace=namespace))
        rows.clear()
        [draft] = proposer.propose([desk.ask(sequence, 4)])
        counts.append(rows[0])
        before = sequence.known
        desk.step(4)
        assert texts(draft) == [sequence.tokens[before : before + 4].tolist()]
    assert counts == [102, 6, 102]  # whole pages are shared while the first still runs
    store_of(proposer).check_integrity()


def test_without_pages_there_is_no_draft_until_there_are(load: Callable[..., CpuRunner], tools: Any) -> None:
    desk = Desk(load("target"))
    proposer = drafter(desk, load("target"), pages=9)
    store = store_of(proposer)
    prompts = {"a": range(3, 103), "b": range(150, 250), "c": range(9, 109)}
    a, b, c = (desk.open(tools.request(name, prompt, max_tokens=60)) for name, prompt in prompts.items())
    for _ in range(3):
        drafts = proposer.propose([desk.ask(sequence, 3) for sequence in (a, b, c)])
        assert [len(draft.paths) for draft in drafts] == [1, 0, 0]
        store.check_integrity()
    proposer.forget(a)
    drafts = proposer.propose([desk.ask(sequence, 3) for sequence in (b, c)])
    assert [len(draft.paths) for draft in drafts] == [1, 0]
    [draft] = proposer.propose([desk.ask(b, 12, branches=8)])  # no pages for branches: they end with their own token
    assert 1 < len(draft.paths) <= 8
    assert len(draft.paths[0]) == 12
    desk.step(40)  # more than the whole store
    drafts = proposer.propose([desk.ask(b, 5), desk.ask(c, 5)])
    assert [len(draft.paths) for draft in drafts] == [0, 0]
    for sequence in (b, c):
        proposer.forget(sequence)
        proposer.forget(sequence)
    store.check_integrity()
    assert store.stats().used == 0


def test_a_step_that_fails_costs_one_draft_and_no_page(load: Callable[..., CpuRunner], tools: Any) -> None:
    desk = Desk(load("target"))
    proposer = drafter(desk, load("target"))
    a = desk.open(tools.request("a", STEM, temperature=0.0, max_tokens=60))
    proposer.propose([desk.ask(a, 3)])
    proposer.forget(a)  # the next one finds part of a page, which has to be copied
    runner, run, fail = proposer._runner, proposer._runner.run, [0]

    def failing(batch: Any) -> Any:
        fail[0] -= 1
        if fail[0] == 0:
            raise RuntimeError("a step failed")
        return run(batch)

    runner.run = failing  # type: ignore[method-assign]
    for at in (1, 2, 3):
        fail[0] = at
        with pytest.raises(RuntimeError, match="a step failed"):
            proposer.propose([desk.ask(a, 6, branches=3)])
        store_of(proposer).check_integrity()
        proposer.propose([desk.ask(a, 6, branches=3)])
        proposer.forget(a)
    drafts = proposer.propose([desk.ask(a, 6, branches=3)])
    fresh = drafter(desk, load("target")).propose([desk.ask(a, 6, branches=3)])
    assert list(map(texts, drafts)) == list(map(texts, fresh))


def test_the_branches_of_a_tree_begin_with_the_likeliest_tokens_beside_its_main_path(
    load: Callable[..., CpuRunner], tools: Any
) -> None:
    desk, tokens, branches = Desk(load("target")), 6, 4
    proposer, single = drafter(desk, load("target")), drafter(desk, load("target"), keep_probabilities=True)
    for start in (0, 13, 30, 41):
        a = desk.open(tools.request(str(start), STEM[start:], temperature=1.0, max_tokens=60))
        [chain] = single.propose([desk.ask(a, tokens)])
        [tree] = proposer.propose([desk.ask(a, tokens, branches)])
        main, *others = texts(tree)
        assert [main] == texts(chain)
        assert chain.probabilities is not None
        so_far, values = 0.0, {}
        for level, q in enumerate(chain.probabilities[0]):
            second = next(token for token in np.argsort(-q).tolist() if token != main[level])
            values[(*main[:level], second)] = so_far + np.log(q[second])
            so_far += np.log(q[main[level]])
        best = sorted(values, key=lambda path: -values[path])[: branches - 1]
        assert [tuple(path[: parting(path, main) + 1]) for path in others] == best
        assert {len(path) for path in others} == {tokens}
        store_of(proposer).check_integrity()


def test_a_branch_goes_on_as_a_text_that_began_like_it(load: Callable[..., CpuRunner], tools: Any) -> None:
    desk, tokens = Desk(load("target")), 6
    proposer = drafter(desk, load("target"))
    a = desk.open(tools.request("a", STEM, temperature=0.0, max_tokens=300))
    b = desk.open(tools.request("b", STEM[3:], temperature=0.0, max_tokens=300))
    partings = set()
    for turn in range(3):
        asks = [desk.ask(a, tokens, 3), desk.ask(b, tokens - 2, 8)]
        begun = [ask.sequence.tokens.tolist() for ask in asks]
        for ask, draft, told in zip(asks, proposer.propose(asks), begun, strict=True):
            main, *others = texts(draft)
            assert len(others) == min(ask.branches, ask.tokens + 1) - 1
            for path in others:
                partings.add(own := parting(path, main) + 1)
                if own < len(path):
                    prompt, rest = told + path[:own], len(path) - own
                    c = desk.open(tools.request(f"{turn}{path}", prompt, temperature=0.0, max_tokens=rest))
                    while c.finish_reason is None:
                        desk.step()
                    assert c.outputs.tolist() == path[own:]
        desk.step(2)
    assert len(partings) > 3


def parting(path: list[int], main: list[int]) -> int:
    """Where two paths part."""
    return next(i for i, (ours, theirs) in enumerate(zip(path, main, strict=False)) if ours != theirs)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_kept_probabilities_are_what_the_tokens_were_sampled_from(
    load: Callable[..., CpuRunner], tools: Any, temperature: float
) -> None:
    desk = Desk(load("target"))
    proposer = drafter(desk, load("target", "int4"), keep_probabilities=True)
    plain = drafter(desk, load("target", "int4"))
    a = desk.open(tools.request("a", STEM, temperature=temperature, top_p=0.9, max_tokens=60))
    [draft] = proposer.propose([desk.ask(a, 5, branches=3)])
    assert texts(draft) == texts(plain.propose([desk.ask(a, 5, branches=3)])[0])
    assert draft.probabilities is not None
    assert len(draft.probabilities) == len(draft.paths) == 3
    main = texts(draft)[0]
    for path, q in zip(texts(draft), draft.probabilities, strict=True):
        assert q.shape == (5, VOCABULARY)
        assert np.abs(q.sum(1) - 1).max() < 1e-5
        assert (q[np.arange(5), path] > 0).all()
        certain = q.max(1) == 1
        if temperature:
            own = [i for i in range(5) if path[:i] == main[:i] and path[i] != main[i]]
            assert certain[own].all()
            assert certain.sum() <= len(own) + 2
        else:
            assert certain.all()
    desk.step(2)
    [draft] = proposer.propose([desk.ask(a, 1)])
    assert draft.probabilities is not None


def answers(desk: Desk, tools: Any, proposer: ModelProposer | None) -> list[Any]:
    """Two requests that share a prefix, one of them with two choices, drafted for before every step if at all."""
    desk.open(tools.request("a", STEM, temperature=0.9, max_tokens=40, logprobs=2))
    desk.open(tools.request("b", STEM[:50], temperature=0.0, max_tokens=40, logprobs=2, n=2, frequency_penalty=0.5))
    streams = [desk.requests[name].stream for name in "ab"]
    drafted = agreed = 0
    while running := [s for s in desk.state.running if s.known + 5 < s.known_limit]:
        asks = [desk.ask(sequence, 4, branches=2) for sequence in running]
        before = desk.settled_pages()
        drafts = [] if proposer is None else proposer.propose(asks)
        assert desk.settled_pages() == before
        knowns = [sequence.known for sequence in running]
        desk.step()
        for sequence, draft, known in zip(running, drafts, knowns, strict=False):
            if draft.paths:
                assert len(draft.paths[0]) == 4
                assert len(draft.paths) == 2
                drafted += 1
                agreed += int(draft.paths[0][0] == sequence.tokens[known])
    assert proposer is None or (drafted > 80 and agreed > 40), (drafted, agreed)
    while len(desk.requests):
        desk.step()
    return [asyncio.run(tools.read(stream)) for stream in streams]


def test_drafting_in_the_targets_pages_leaves_what_it_computed_as_it_was(
    load: Callable[..., CpuRunner], tools: Any
) -> None:
    desk = Desk(load("target"))
    runner = load("target", "int4")
    runner.join(desk.runner, pages=True)
    drafted = answers(desk, tools, ModelProposer("self", runner, TargetPages(desk.kv), desk.sampling, budget=BUDGET))
    assert drafted == answers(Desk(load("target")), tools, None)
    assert desk.kv.stats().used == 0


def test_nothing_is_drafted_in_pages_that_wait_for_a_copy(load: Callable[..., CpuRunner], tools: Any) -> None:
    desk = Desk(load("target"))
    runner = load("target", "int4")
    runner.join(desk.runner, pages=True)
    proposer = ModelProposer("self", runner, TargetPages(desk.kv), desk.sampling, budget=BUDGET)
    a = desk.open(tools.request("a", STEM[:50], temperature=0.0, max_tokens=40, n=2))
    asks = [desk.ask(choice, 3) for choice in desk.requests["a"].choices]
    assert [draft.paths for draft in proposer.propose(asks)] == [[], []]
    desk.step()
    assert [len(draft.paths) for draft in proposer.propose([desk.ask(a, 3)])] == [1]


def test_the_time_of_a_drafted_token_is_measured(load: Callable[..., CpuRunner]) -> None:
    proposer = drafter(Desk(load("target")), load("other"))
    times = [proposer.seconds(count) for count in (1, 2, 3, 16, 17, 200)]
    assert times[0] > 0
    assert times[3] <= times[4] <= times[5]


def mixed_requests(tools: Any) -> list[Request]:
    rng = random.Random(5)
    made = []
    for i in range(16):
        prompt = STEM[: rng.choice([1, 17, 60])] + [rng.randrange(3, VOCABULARY) for _ in range(rng.choice([1, 20]))]
        options: dict[str, Any] = {
            "temperature": (0.0, 0.7, 1.2)[i % 3],
            "seed": i,
            "max_tokens": rng.choice([1, 40, 90]),
        }
        options |= {"logprobs": rng.choice([None, 2]), "frequency_penalty": rng.choice([0.0, 0.0, 0.8])}
        options |= {"ignore_eos": rng.random() < 0.5, "min_tokens": rng.choice([0, 5]), "n": 1 + (i % 8 == 3)}
        if i % 6 == 5:
            options["constraint"] = tools.Rule(rng.randrange(9), rng.choice(["at once", "when asked"]))
        made.append(tools.request(str(i), prompt, **options))
    return made


async def engine_answers(
    tools: Any, runner: CpuRunner, requests: list[Request], together: int, drafting: Any = None, **conditions: Any
) -> tuple[list[Any], Engine]:
    """Every choice of every request, so many requests at once; `drafting` makes a proposer of a store and a state."""
    pages, branches = conditions.pop("pages", PAGES), conditions.pop("branches", 1)
    limits = Limits(**{"max_model_len": CONTEXT, "max_num_seqs": 8, "max_num_batched_tokens": 128} | conditions)
    store = KVStore(
        num_pages=pages, page_size=PAGE, max_sequences=8 * branches, max_model_len=CONTEXT,
        prefix_caching=limits.prefix_caching,
    )  # fmt: skip
    sampling = SamplingState(8, VOCABULARY, (EOS,))
    speculation = None
    if drafting is not None:
        proposer = drafting(store, sampling)
        speculation = Speculation(proposer, lambda rows: 1 + rows / 64, tokens=5, branches=branches, adaptive=False)
    engine = Engine(runner, store, sampling, limits, speculation=speculation)
    engine.start()
    free = asyncio.Semaphore(together)

    async def ask(request: Request) -> Any:
        async with free:
            [stream] = engine.submit([request])
            answers = await tools.read(stream)
            return {index: (answer.text, answer.error) for index, answer in answers.items()}

    found = await asyncio.gather(*map(ask, requests))
    await engine.until_idle()
    store.check_integrity()
    assert store.stats().used == 0
    await engine.stop()
    return found, engine


@pytest.mark.parametrize("way", ["self", "draft_model", "same model"])
def test_the_engine_gives_the_undrafted_text_whatever_model_drafts(
    load: Callable[..., CpuRunner], tools: Any, way: str
) -> None:
    requests = mixed_requests(tools)
    target = load("target")
    target.allocate(PAGES, PAGE)
    alone, _ = asyncio.run(engine_answers(tools, target, requests, 1, prefix_caching=False))
    runner = {"self": load("target", "int4"), "draft_model": load("other"), "same model": load("target")}[way]
    runner.join(target, pages=way == "self")
    if way != "self":
        runner.allocate(PAGES, PAGE)
    accepted = preempted = 0
    stores = []

    def drafting(store: KVStore, sampling: SamplingState) -> ModelProposer:
        pages: Any = TargetPages(store)
        if way != "self":
            stores.append(
                KVStore(num_pages=rng.choice([PAGES, 30]), page_size=PAGE, max_sequences=24, max_model_len=CONTEXT)
            )
            pages = OwnPages(stores[-1])
        return ModelProposer(way, runner, pages, sampling, budget=128)

    for turn in range(4):
        rng = random.Random(turn)
        conditions = {"pages": (12, PAGES)[turn % 2], "branches": rng.choice([1, 3]), "prefix_caching": turn < 3}
        rng.shuffle(order := list(range(len(requests))))
        found, engine = asyncio.run(
            engine_answers(tools, target, [requests[i] for i in order], (16, 3)[turn % 2], drafting, **conditions)
        )
        assert found == [alone[i] for i in order], conditions
        accepted += sum(record.accepted_tokens for record in engine.journal.steps)
        preempted += sum(record.preempted != () for record in engine.journal.steps)
    for store in stores:
        store.check_integrity()
        assert store.stats().used == 0
    assert accepted > (0 if way == "draft_model" else 300)
    assert preempted > 4


@pytest.mark.parametrize(("target", "drafting", "way"), [("stored", "stored", "draft_model"), ("none", "int4", "self")])
def test_on_the_default_model_drafts_are_mostly_right_and_those_of_its_own_weights_always(
    tools: Any, target: str, drafting: str, way: str
) -> None:
    checkpoint = open_checkpoint(resolve_source(None))
    options: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "kv_dtype": "bfloat16", "threads": 2}
    options |= {"attention_backend": "cpu", "max_model_len": CONTEXT}
    runner, other = (build_runner(checkpoint, quantization=kind, **options) for kind in (target, drafting))
    assert isinstance(runner, CpuRunner)
    assert isinstance(other, CpuRunner)
    desk = Desk(runner)
    other.join(runner, pages=way == "self")
    pages = TargetPages(desk.kv)
    proposer = (
        ModelProposer("self", other, pages, desk.sampling, budget=BUDGET) if way == "self" else drafter(desk, other)
    )
    text = "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n"
    prompt = load_tokenizer(checkpoint).tokenizer.encode(text).ids
    sequences = [
        desk.open(tools.request(f"{t}", prompt, temperature=t, seed=3, max_tokens=300)) for t in (0.0, 0.5, 1.0)
    ]
    accepted = drafted = 0
    for _ in range(4):
        drafts = proposer.propose([desk.ask(sequence, 6) for sequence in sequences])
        befores = [sequence.known for sequence in sequences]
        desk.step(6)
        for sequence, draft, before in zip(sequences, drafts, befores, strict=True):
            said = sequence.tokens[before:].tolist()
            drafted += 6
            accepted += next((i for i, token in enumerate(texts(draft)[0]) if token != said[i]), len(draft.paths[0]))
    print(f"{way} of {drafting} for {target}: {accepted} of {drafted} accepted")
    assert accepted == drafted if target == drafting else accepted > 0.5 * drafted
