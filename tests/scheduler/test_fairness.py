"""Owners share the machine by tokens, whoever asks for more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest


def admitted(bench: Any) -> list[str]:
    return [sequence.request.id for plan in bench.plans for sequence in plan.admitted]


def test_one_that_asks_little_does_not_wait_behind_the_queue_of_another(tools: Any) -> None:
    bench = tools.Bench(max_num_seqs=2)
    bench.submit(*[tools.request(f"much{i}", [i] * 9, owner="much") for i in range(40)])
    bench.step()
    bench.submit(*[tools.request(f"little{i}", [50 + i] * 9, owner="little") for i in range(3)])
    bench.run()
    order = admitted(bench)
    assert [order.index(f"little{i}") for i in range(3)] == [2, 4, 6]
    assert [name for name in order if "much" in name] == [f"much{i}" for i in range(40)], "in their own order"


@pytest.mark.parametrize("num_pages", [256, 24])  # the second preempts
def test_owners_that_always_have_something_waiting_get_the_same_tokens(tools: Any, num_pages: int) -> None:
    bench = tools.Bench(max_num_seqs=4, num_pages=num_pages)
    sizes = {"short": (5, 6), "long": (20, 40)}
    numbers = count()

    def requests(owner: str) -> Iterator[Any]:
        prompt, answer = sizes[owner]
        while True:
            number = next(numbers)
            tokens = [number // 50 % 50, number % 50, *[number % 47] * (prompt - 2)]
            yield tools.request(f"{owner}{number}", tokens, owner=owner, max_tokens=answer)

    sources = {owner: requests(owner) for owner in sizes}
    for _ in range(2500):
        for owner, source in sources.items():
            while bench.requests.shares.active(owner) < 12:
                bench.submit(next(source))
        bench.step()
    served: Counter[str] = Counter()
    for request_id in bench.streams:
        if request_id not in bench.requests:
            [answer] = bench.answers(request_id).values()
            owner = request_id.rstrip("0123456789")
            served[owner] += sizes[owner][0] - answer.cached_tokens + sizes[owner][1]
    assert min(served.values()) > 2000
    assert 0.8 < served["short"] / served["long"] < 1.25


def test_what_is_cancelled_while_it_waits_costs_its_owner_nothing(tools: Any) -> None:
    bench = tools.Bench(max_num_seqs=1)
    bench.submit(tools.request("running", [1], owner="other"))
    bench.step()
    bench.submit(*[tools.request(f"gone{i}", [2] * 50, owner="hasty") for i in range(10)])
    bench.submit(*[tools.request(f"other{i}", [3] * 30, owner="other") for i in range(4)])
    for i in range(10):
        bench.requests.end(f"gone{i}", None, "cancelled")
    bench.submit(tools.request("one", [4] * 30, owner="hasty"), tools.request("two", [5] * 30, owner="hasty"))
    bench.run()
    assert admitted(bench) == ["running", "one", "other0", "two", "other1", "other2", "other3"]


def test_without_owners_requests_come_in_the_order_of_their_arrival(tools: Any) -> None:
    bench = tools.Bench(max_num_seqs=2)
    bench.submit(*[tools.request(f"a{i}", [i] * (1 + 7 * i % 40)) for i in range(20)])
    bench.requests.end("a7", None, "cancelled")
    bench.step()
    bench.submit(*[tools.request(f"b{i}", [i]) for i in range(20)])
    bench.run()
    assert admitted(bench) == [f"a{i}" for i in range(20) if i != 7] + [f"b{i}" for i in range(20)]


def test_everybody_starts_even_after_a_pause(tools: Any) -> None:
    bench = tools.Bench(max_num_seqs=1)
    bench.submit(*[tools.request(f"a{i}", [i] * 40, owner="a") for i in range(5)])
    bench.run()
    bench.submit(tools.request("a", [1], owner="a"), tools.request("b", [2], owner="b"))
    bench.run()
    assert admitted(bench)[-2:] == ["a", "b"]
