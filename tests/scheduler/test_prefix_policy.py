"""The prefix policy lets those with cached prefixes in first, and nobody wait for ever."""

from __future__ import annotations

import random
from typing import Any

from scheduler import plan


def admitted(bench: Any) -> list[str]:
    return [sequence.request.id for step in bench.plans for sequence in step.admitted]


def test_the_longest_cached_prefix_comes_first(tools: Any) -> None:
    bench = tools.Bench(policy="prefix", max_num_seqs=1)
    bench.submit(tools.request("warm", range(40), max_tokens=1))
    bench.run()
    bench.plans.clear()
    bench.submit(
        tools.request("new", [50] * 20),
        tools.request("short", [*range(12), 60]),
        tools.request("long", [*range(36), 60]),
        tools.request("other", [*range(36), 60], namespace="other"),
    )
    bench.run()
    assert admitted(bench) == ["long", "short", "new", "other"]


def test_order_of_arrival_decides_under_fcfs(tools: Any) -> None:
    bench = tools.Bench(policy="fcfs", max_num_seqs=1)
    bench.submit(tools.request("warm", range(40), max_tokens=1))
    bench.run()
    bench.plans.clear()
    bench.submit(tools.request("new", [50] * 20), tools.request("long", [*range(36), 60]))
    bench.run()
    assert admitted(bench) == ["new", "long"]


def test_nobody_is_overtaken_more_often_than_the_bound(tools: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(plan, "MAX_OVERTAKEN", 5)
    bench = tools.Bench(policy="prefix", max_num_seqs=1)
    bench.submit(tools.request("warm", range(40), max_tokens=1))
    bench.run()
    bench.plans.clear()
    bench.submit(tools.request("unlucky", [50] * 20), *(tools.request(f"r{i}", [*range(36), i]) for i in range(20)))
    bench.run()
    assert admitted(bench).index("unlucky") == 5


def test_in_a_pool_too_small_for_all_prefixes_it_computes_less_than_order_of_arrival(tools: Any) -> None:
    """Four prefixes of which the pool holds one: taken in turn, each is computed again for every request."""
    rows = {}
    for policy in ("fcfs", "prefix"):
        rng = random.Random(3)
        prefixes = [[rng.randrange(tools.VOCAB) for _ in range(80)] for _ in range(4)]
        bench = tools.Bench(policy=policy, max_num_seqs=1, num_pages=30, max_model_len=110)
        requests = [tools.request(f"r{i}", [*prefixes[i % 4], i % 61, 7], max_tokens=2) for i in range(32)]
        bench.submit(*requests)
        bench.run()
        for request in requests:
            assert bench.answers(request.id)[0].text == tools.expected(request).text
        rows[policy] = bench.runner.rows
    optimum = 4 * 80 + 32 * 3
    assert rows["fcfs"] > 5 * optimum
    assert rows["prefix"] <= 1.05 * optimum, rows
