"""A pool of 1.2 times one full context: everything completes or is cancelled cleanly, and equals its solo run."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

CONTEXT, PAGE = 200, 4
POOL = int(1.2 * CONTEXT) // PAGE
TIERS = pytest.mark.parametrize("slots", [0, 400])


def bench_of(tools: Any, **options: Any) -> Any:
    return tools.Bench(num_pages=POOL, page_size=PAGE, max_model_len=CONTEXT, **{"max_num_seqs": 64, **options})


def run_all(tools: Any, bench: Any, requests: list[Any]) -> int:
    bench.submit(*requests)
    steps = bench.run()
    for request in requests:
        for index, answer in bench.answers(request.id).items():
            assert answer.text == tools.expected(request, index).text
    bench.assert_baseline()
    return int(steps)


@TIERS
@pytest.mark.parametrize("policy", ["fcfs", "priority", "prefix"])
def test_four_requests_of_60_percent_each(tools: Any, policy: str, slots: int) -> None:
    bench = bench_of(tools, policy=policy, slots=slots)
    size = CONTEXT * 6 // 10
    requests = [tools.request(f"r{i}", [i] * (size // 2), max_tokens=size // 2) for i in range(4)]
    steps = run_all(tools, bench, requests)
    # Each two of them do not fit: they run one after the other, and nobody is thrown out again and again.
    assert steps <= 4 * (size // 2 + 4)
    assert sum(len(step.preempted) for step in bench.plans) <= 8


@TIERS
def test_64_requests_of_10_percent_each(tools: Any, slots: int) -> None:
    bench = bench_of(tools, slots=slots)
    run_all(tools, bench, [tools.request(f"r{i}", [i % 61, *range(9)], max_tokens=10) for i in range(64)])


@TIERS
def test_eight_choices_that_cannot_all_fit(tools: Any, slots: int) -> None:
    bench = bench_of(tools, slots=slots)
    requests = [tools.request(f"r{i}", [i, *range(40)], n=8, temperature=1.0, max_tokens=60) for i in range(3)]
    run_all(tools, bench, requests)
    assert sum(len(step.preempted) for step in bench.plans) > 0


@TIERS
@pytest.mark.case(33)
def test_a_storm_of_2000_cancellations_at_random_moments(tools: Any, slots: int) -> None:
    rng = random.Random(slots)

    async def test(bench: Any) -> None:
        waiting = asyncio.Semaphore(100)
        cancelled = 0

        async def one(number: int) -> None:
            nonlocal cancelled
            head = list(range(rng.choice([3, 30, 90])))
            request = tools.request(
                f"r{number}", [*head, number % 61], n=rng.choice([1, 1, 2, 4]), max_tokens=rng.randint(1, 40)
            )
            async with waiting:
                [stream] = bench.engine.submit([request])
                reading = asyncio.create_task(tools.read(stream))
                for _ in range(rng.choice([0, 1, 3, 10, 40])):
                    await asyncio.sleep(0)
                    if rng.random() < 0.1:
                        await asyncio.sleep(0.002)
                bench.engine.cancel(request.id)
                for index, answer in (await reading).items():
                    text = tools.expected(request, index)
                    cancelled += answer.finish_reason == "cancelled"
                    assert answer.error is None
                    assert answer.tokens == text.tokens[: len(answer.tokens)]

        checks = 0

        async def check() -> None:
            nonlocal checks
            while True:
                await bench.engine.between_steps(bench.kv.check_integrity)
                checks += 1

        checking = asyncio.create_task(check())
        await asyncio.gather(*(one(number) for number in range(2000)))
        checking.cancel()
        assert checks > 10
        await bench.engine.until_idle()
        assert cancelled > 1000
        bench.assert_baseline()
        whole = tools.request("whole", range(CONTEXT // 2), max_tokens=CONTEXT - CONTEXT // 2)
        [stream] = bench.engine.submit([whole])
        assert (await tools.read(stream))[0].text == tools.expected(whole).text

    options = {"num_pages": POOL, "page_size": PAGE, "max_model_len": CONTEXT, "max_num_seqs": 16, "slots": slots}
    tools.run_engine(test, seconds=120, max_queued_requests=4000, **options)


def test_what_could_never_fit_is_refused_at_once_with_the_numbers(tools: Any) -> None:
    from scheduler.errors import NeverFits

    async def test(bench: Any) -> None:
        with pytest.raises(NeverFits, match=r"has 200 prompt tokens and needs room for one more, but .* allows 200"):
            bench.engine.submit([tools.request("r", range(CONTEXT))])

    tools.run_engine(test, num_pages=POOL, page_size=PAGE, max_model_len=CONTEXT)
