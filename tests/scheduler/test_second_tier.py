"""Pages that come back from the second tier are as good as computed, and come only when that is cheaper."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest


def churn(tools: Any, bench: Any, names: str, length: int = 40) -> int:
    """Run a request for each letter, one after the other; the rows it took."""
    before = bench.runner.rows
    for name in names:
        request = tools.request(f"{name}{bench.runner.steps}", [ord(name) % 61] * 2 + list(range(length - 2)))
        bench.submit(request)
        bench.run()
        assert bench.answers(request.id)[0].text == tools.expected(request).text
    return int(bench.runner.rows - before)


def test_what_was_evicted_comes_back_without_being_computed(tools: Any) -> None:
    bench = tools.Bench(num_pages=13, slots=100)
    assert churn(tools, bench, "abcd") == 4 * 47
    again = churn(tools, bench, "abcd")
    # What is lost is the last page of each, not whole, and the token that must be computed anyway.
    assert again <= 4 * (47 - 36)
    assert bench.kv.tier.counts["loaded"] >= 4 * 8
    assert bench.kv.tier.counts["recomputed"] == 0
    bench.assert_baseline()


def test_a_loaded_prefix_is_loaded_once_for_all_who_share_it(tools: Any) -> None:
    bench = tools.Bench(num_pages=32, slots=100, max_num_seqs=8)
    prefix = list(range(32))
    for other in ([], [9] * 120):
        bench.submit(tools.request(f"first{len(other)}", other or prefix, max_tokens=4))
        bench.run()
    assert bench.kv.match_length(_array([*prefix, 1])) < 16
    before = bench.runner.rows
    requests = [tools.request(f"r{i}", [*prefix, 50 + i], max_tokens=1) for i in range(8)]
    bench.submit(*requests)
    assert len(bench.step().admitted) == 8
    assert bench.kv.tier.counts["loaded"] <= 8
    assert bench.runner.rows - before == 8
    for request in requests:
        assert bench.answers(request.id)[0].text == tools.expected(request).text
        assert bench.answers(request.id)[0].cached_tokens == 32


def test_a_tier_that_is_slower_than_computing_is_left_alone_and_tried_again_later(tools: Any) -> None:
    bench = tools.Bench(num_pages=13, slots=100)
    churn(tools, bench, "ab")
    costs = bench.kv.tier.costs
    costs.compute_token, costs.load_page = 1e-6, 1.0
    assert churn(tools, bench, "a") >= 43
    assert bench.kv.tier.counts["loaded"] == 0
    assert bench.kv.tier.counts["recomputed"] > 0
    assert bench.kv.tier.counts["not_stored"] > 0
    for _ in range(1000):
        costs.pays(4, both_ways=False)
    assert costs.pays(4, both_ways=False)


def test_a_preempted_request_resumes_from_the_second_tier(tools: Any) -> None:
    rows = {}
    for slots in (0, 200):
        bench = tools.Bench(num_pages=30, slots=slots, max_num_seqs=4)
        requests = [tools.request(f"r{i}", [i, *range(30)], max_tokens=60) for i in range(4)]
        bench.submit(*requests)
        bench.run()
        for request in requests:
            assert bench.answers(request.id)[0].text == tools.expected(request).text
        assert sum(len(step.preempted) for step in bench.plans) > 0
        rows[slots] = bench.runner.rows
        bench.assert_baseline()
    computed_once = sum(31 + 60 - 1 for _ in range(4))
    assert rows[0] > rows[200]
    assert rows[200] <= computed_once + 4 * 4 * 3  # parts of pages, at each time


def test_a_failed_step_leaves_nothing_in_either_tier(tools: Any) -> None:
    async def test(bench: Any) -> None:
        async def ask(name: str, token: int) -> Any:
            request = tools.request(name, [token] * 40, max_tokens=4)
            [stream] = bench.engine.submit([request])
            return request, (await tools.read(stream))[0]

        for i in range(3):
            await ask(f"r{i}", i)
        assert bench.kv.tier.used

        def fail(batch: Any) -> None:
            raise RuntimeError("broken")

        keep, bench.runner.before = bench.runner.before, fail
        _, answer = await ask("failing", 9)
        assert answer.error is not None
        bench.runner.before = keep
        assert not bench.kv.tier.used
        request, answer = await ask("again", 0)
        assert answer.text == tools.expected(request).text
        assert answer.cached_tokens == 0

    tools.run_engine(test, num_pages=13, slots=50)


def test_the_times_of_both_ways_are_measured(tools: Any) -> None:
    async def test(bench: Any) -> None:
        for name in ("a", "b", "a2"):
            prompt = [ord(name[0]) % 61] * 40
            [stream] = bench.engine.submit([tools.request(name, prompt, max_tokens=2)])
            await tools.read(stream)
        costs = bench.kv.tier.costs
        assert min(costs.store_page, costs.load_page, costs.compute_token) > 0
        events = {event.kind: event.detail for event in bench.engine.journal.life("a2").events}
        assert events["admitted"]["restored"] > 0

    tools.run_engine(test, num_pages=13, slots=50)


def test_work_between_steps_sees_the_store_stand_still(tools: Any) -> None:
    async def test(bench: Any) -> None:
        streams = bench.engine.submit([tools.request(f"r{i}", range(i, i + 20), max_tokens=30) for i in range(3)])
        reading = [asyncio.create_task(tools.read(stream)) for stream in streams]
        for _ in range(5):
            steps = bench.runner.steps

            def look() -> int:
                bench.engine.cancel("r0")
                bench.kv.check_integrity()
                return int(bench.runner.steps)

            assert await bench.engine.between_steps(look) >= steps
        with pytest.raises(ZeroDivisionError):
            await bench.engine.between_steps(lambda: 1 // 0)
        await asyncio.gather(*reading)

    tools.run_engine(test)


def _array(tokens: list[int]) -> Any:
    import numpy as np

    return np.array(tokens, np.int32)
