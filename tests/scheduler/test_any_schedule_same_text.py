"""Whatever the pool, the budget, the neighbours and the moment, a request gets the text it would get alone."""

from __future__ import annotations

import random
from typing import Any

import pytest

from scheduler.proposers.lookahead import LookaheadProposer
from scheduler.proposers.ngram import NgramProposer


def random_request(tools: Any, rng: random.Random, name: str, heads: list[list[int]], **fixed: Any) -> Any:
    head = rng.choice(heads)
    prompt = head[: rng.randint(1, len(head))] + [rng.randrange(tools.VOCAB) for _ in range(rng.choice([0, 1, 3, 9]))]
    options: dict[str, Any] = {
        "n": rng.choice([1, 1, 1, 2, 3]),
        "priority": rng.randint(-2, 2),
        "namespace": rng.choice([None, None, "other"]),
        "seed": rng.randrange(-5, 5),
        "temperature": rng.choice([0.0, 1.0]),
        "max_tokens": rng.randint(1, 24),
        "ignore_eos": rng.random() < 0.7,
        "stop_token_ids": (3,) if rng.random() < 0.2 else (),
        "min_tokens": rng.choice([0, 0, 5]),
        "presence_penalty": rng.choice([0.0, 0.0, 0.5]),
        "logprobs": rng.choice([None, None, 0, 2]),
        "prompt_logprobs": rng.choice([None, None, None, 1]),
    }
    if rng.random() < 0.3:
        # A text that only an eos token can end has to let one end it.
        tells = rng.choice(["at once", "when asked", "never"])
        options["constraint"] = tools.Rule(rng.randint(0, 12), tells)
        if tells == "never":
            options |= {"ignore_eos": False, "min_tokens": 0}
    return tools.request(name, prompt, **(options | fixed))


def any_proposer(tools: Any, rng: random.Random) -> dict[str, Any]:
    """Someone who drafts, and how many paths at once."""
    branches = rng.choice([1, 1, 2, 3])
    match rng.choice(["oracle", "oracle", "ngram", "lookahead"]):
        case "ngram":
            return {"proposer": NgramProposer(1, 3, share_outputs=rng.random() < 0.5)}
        case "lookahead":
            return {"proposer": LookaheadProposer(4), "branches": branches}
    return {"proposer": tools.Oracle(rng, rng.choice([0.5, 0.8, 1.0])), "branches": branches}


@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
@pytest.mark.parametrize("seed", range(60))
def test_every_request_equals_its_solo_run_under_any_pressure(tools: Any, seed: int, drafted: bool) -> None:
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4, 16])
    longest = 40 + 9 + 24
    tokens = rng.choice([longest, 2 * longest, 10 * longest])
    bench = tools.Bench(
        page_size=page_size,
        num_pages=-(-tokens // page_size) + rng.randint(0, 2),
        max_num_seqs=rng.choice([1, 2, 3, 8]),
        max_scored_rows=rng.choice([1, 5, 64]),
        policy=rng.choice(["fcfs", "priority", "prefix"]),
        prefix_caching=(caching := rng.random() < 0.7),
        slots=rng.choice([0, 2, 100]) if caching else 0,
        **any_proposer(tools, rng) if drafted else {},
    )
    heads = [[rng.randrange(tools.VOCAB) for _ in range(40)] for _ in range(3)]
    requests = [random_request(tools, rng, f"r{i}", heads) for i in range(14)]
    arriving = list(requests)
    for _ in range(4000):
        while arriving and rng.random() < 0.3:
            bench.submit(arriving.pop())
        if not arriving and not len(bench.requests):
            break
        bench.step(rng.randint(1, 64))
    assert not arriving
    for request in requests:
        answers = bench.answers(request.id)
        assert set(answers) == set(range(request.n))
        for index, answer in answers.items():
            assert answer.text == tools.expected(request, index).text, (request, index)
    bench.assert_baseline()


@pytest.mark.case(17)
def test_a_tiny_pool_forces_preemption_and_nothing_is_lost_or_doubled(tools: Any) -> None:
    bench = tools.Bench(page_size=4, num_pages=12, max_num_seqs=8)
    requests = [
        tools.request(f"r{i}", [i, 9, i, 11, 5], max_tokens=30, logprobs=1, temperature=i % 2, presence_penalty=0.5)
        for i in range(8)
    ]
    bench.submit(*requests)
    bench.run()
    for request in requests:
        assert bench.answers(request.id)[0].text == tools.expected(request).text
    assert sum(len(step.preempted) for step in bench.plans) > 3
    assert not any(step.preempted and step.admitted for step in bench.plans)
    bench.assert_baseline()


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 16, 64])
def test_the_chunk_size_does_not_matter(tools: Any, budget: int) -> None:
    bench = tools.Bench(max_num_batched_tokens=budget)
    requests = [tools.request(f"r{i}", range(i, i + 37), n=1 + i % 2, temperature=1.0) for i in range(3)]
    bench.submit(*requests)
    bench.run()
    for request in requests:
        for index, answer in bench.answers(request.id).items():
            assert answer.text == tools.expected(request, index).text


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
@pytest.mark.case(18)
def test_prompt_logprobs_do_not_change_with_a_warm_cache(tools: Any, length: int) -> None:
    bench = tools.Bench(page_size=4)
    for name in ("cold", "warm"):
        request = tools.request(name, range(length), prompt_logprobs=2, max_tokens=1)
        bench.submit(request)
        bench.run()
        answer = bench.answers(name)[0]
        assert len(answer.prompt_logprobs) == length - 1
        assert answer.text == tools.expected(request).text
        assert answer.cached_tokens == 0


def test_a_prompt_can_be_scored_without_generating(tools: Any) -> None:
    bench = tools.Bench()
    request = tools.request("score", range(10), prompt_logprobs=0, max_tokens=0, n=2)
    nothing = tools.request("nothing", range(10), max_tokens=0)
    single = tools.request("single", [4], prompt_logprobs=0, max_tokens=0)
    bench.submit(request, nothing, single)
    bench.run()
    assert bench.runner.rows == 9  # no row for the last token: nothing follows it
    answers = bench.answers("score")
    assert [answers[i].text for i in (0, 1)] == [tools.expected(request, i).text for i in (0, 1)]
    assert bench.answers("nothing")[0].finish_reason == bench.answers("single")[0].finish_reason == "length"
    bench.assert_baseline()


def test_a_fully_cached_prompt_computes_its_last_token_only(tools: Any) -> None:
    bench = tools.Bench(page_size=4)
    for name, rows, cached in (("cold", 12, 0), ("warm", 1, 11)):
        before = bench.runner.rows
        request = tools.request(name, range(12), max_tokens=1)
        bench.submit(request)
        bench.run()
        assert bench.runner.rows - before == rows
        assert bench.answers(name)[0].cached_tokens == cached
        assert bench.answers(name)[0].text == tools.expected(request).text


@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
@pytest.mark.parametrize("seed", range(20))
def test_cancelling_at_any_moment_disturbs_nobody(tools: Any, seed: int, drafted: bool) -> None:
    rng = random.Random(1000 + seed)
    bench = tools.Bench(
        page_size=4,
        num_pages=rng.choice([20, 40, 200]),
        max_num_seqs=4,
        policy=rng.choice(["fcfs", "priority", "prefix"]),
        slots=rng.choice([0, 3, 100]),
        **any_proposer(tools, rng) if drafted else {},
    )
    heads = [[rng.randrange(tools.VOCAB) for _ in range(40)] for _ in range(2)]
    requests = [random_request(tools, rng, f"r{i}", heads) for i in range(20)]
    leaving = {request.id for request in requests if rng.random() < 0.5}
    cancelled = set()

    def leave(batch: Any = None) -> None:
        for name in sorted(leaving - cancelled):
            if name in bench.requests and rng.random() < 0.08:
                cancelled.add(name)
                bench.requests.end(name, None, "cancelled")

    bench.runner.before = leave  # while the step is in flight
    arriving = list(requests)
    while arriving or len(bench.requests):
        if arriving and rng.random() < 0.3:
            bench.submit(arriving.pop())
        leave()
        bench.step(rng.randint(1, 40))
    for request in requests:
        for index, answer in bench.answers(request.id).items():
            text = tools.expected(request, index)
            if answer.finish_reason == "cancelled":
                assert request.id in cancelled
                assert answer.tokens == text.tokens[: len(answer.tokens)]
            else:
                assert answer.text == text.text
    assert cancelled
    bench.assert_baseline()
