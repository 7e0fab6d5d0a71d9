"""What may wait, and for how long."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler import queue_bounds
from scheduler.errors import QueueFull


async def measured(tools: Any, bench: Any, count: int = 8) -> None:
    """Let steps take a second and some requests pass, so that the engine knows how fast they leave."""

    def advance(record: Any) -> None:
        bench.clock.now += 1.0

    usual, bench.runner.before = bench.runner.before, advance
    bench.engine.submit([tools.request(f"m{i}", [i], max_tokens=4) for i in range(count)])
    await bench.engine.until_idle()
    bench.runner.before = usual


def refused(tools: Any, bench: Any, request_id: str, **fields: Any) -> QueueFull:
    with pytest.raises(QueueFull) as full:
        bench.engine.submit([tools.request(request_id, [1], **fields)])
    return full.value


@pytest.mark.case(35)
def test_what_would_wait_too_long_is_refused_and_told_when_to_come_back(tools: Any) -> None:
    async def test(bench: Any) -> None:
        await measured(tools, bench)  # 8 in 8 seconds
        assert bench.engine.drain_rate == pytest.approx(1.0)
        bench.engine.submit([tools.request(f"r{i}", [i], max_tokens=50) for i in range(4 + 10)])
        error = refused(tools, bench, "late")
        assert (error.waiting, error.limit, error.unit) == (11, 10, "seconds")
        assert error.retry_after_seconds == 1
        bench.engine.cancel("r13")
        bench.engine.submit([tools.request("in time", [1])])

    tools.run_engine(test, max_num_seqs=4, max_queue_delay=10.0)


def test_without_a_bound_given_it_is_the_time_of_a_first_token(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_bounds, "MIN_DELAY_SECONDS", 0.5)

    async def test(bench: Any) -> None:
        await measured(tools, bench, count=80)
        # The first token takes a step: a second, once the mean has got there.
        bench.engine.submit([tools.request(f"r{i}", [i], max_tokens=50) for i in range(8 + 2)])
        error = refused(tools, bench, "late")
        assert error.unit == "seconds"
        assert 0.9 < error.limit <= 1.0

    tools.run_engine(test, max_num_seqs=8, max_queue_delay=None)


def test_a_few_may_always_wait(tools: Any) -> None:
    async def test(bench: Any) -> None:
        await measured(tools, bench, count=4)
        for i in range(8):
            bench.engine.submit([tools.request(f"r{i}", [i], max_tokens=50)])
        assert refused(tools, bench, "r8").unit == "seconds"

    tools.run_engine(test, max_num_seqs=1, max_queue_delay=0.5)


def test_a_batch_is_measured_by_its_first_place(tools: Any) -> None:
    async def test(bench: Any) -> None:
        await measured(tools, bench)
        bench.engine.submit([tools.request(f"r{i}", [i]) for i in range(40)])

    tools.run_engine(test, max_num_seqs=8, max_queue_delay=0.5)


@pytest.mark.case(35)
def test_no_owner_fills_the_queue_of_all(tools: Any) -> None:
    async def test(bench: Any) -> None:
        bench.hold()
        bench.engine.submit([tools.request("running", [1], owner="a", max_tokens=50)])
        await bench.in_step()
        for i in range(4):
            bench.engine.submit([tools.request(f"a{i}", [1], owner="a")])
        error = refused(tools, bench, "a4", owner="a")
        assert (error.waiting, error.limit, error.unit) == (4, 4, "share")
        bench.engine.submit([tools.request("b0", [1], owner="b")])
        bench.engine.submit([tools.request("b1", [1], owner="b")])
        assert refused(tools, bench, "b2", owner="b").waiting == 2
        bench.engine.submit([tools.request("c0", [1], owner="c")])

    tools.run_engine(test, max_num_seqs=1, max_queued_requests=8)


def test_every_choice_of_a_request_counts_against_its_owners_share(tools: Any) -> None:
    async def test(bench: Any) -> None:
        bench.hold()
        bench.engine.submit([tools.request("running", [1], owner="a", n=3, max_tokens=50)])  # two more than places
        await bench.in_step()
        bench.engine.submit([tools.request("queued", [1], owner="a", n=2)])
        error = refused(tools, bench, "third", owner="a")
        assert (error.waiting, error.limit, error.unit) == (4, 4, "share")
        bench.engine.submit([tools.request("b", [1], owner="b", n=2)])

    tools.run_engine(test, max_num_seqs=1, max_queued_requests=8)


def test_the_wait_of_one_that_asks_little_is_not_that_of_the_others(tools: Any) -> None:
    async def test(bench: Any) -> None:
        await measured(tools, bench)
        bench.hold()
        bench.engine.submit([tools.request(f"much{i}", [i] * 9, owner="much", max_tokens=50) for i in range(4)])
        bench.engine.submit([tools.request(f"more{i}", [i] * 9, owner="much", max_tokens=50) for i in range(20)])
        assert refused(tools, bench, "late", owner="much").unit == "seconds"
        bench.engine.submit([tools.request("little", [1], owner="little")])

    tools.run_engine(test, max_num_seqs=4, max_queue_delay=3.0)


@pytest.mark.parametrize("prompt", [range(50), None])  # one that all share, and one of each's own
def test_a_burst_into_free_places_is_taken_until_its_first_has_waited_too_long(tools: Any, prompt: Any) -> None:
    async def test(bench: Any) -> None:
        await measured(tools, bench)
        bench.hold()
        for i in range(20):
            own = [i % 60, i // 2, 5] * 20
            bench.engine.submit([tools.request(f"r{i}", own if prompt is None else prompt, max_tokens=40)])
        await bench.in_step()
        assert bench.engine.waiting > 15
        bench.clock.now += 10.0
        if prompt is None:
            assert refused(tools, bench, "late").unit == "seconds"
        else:  # those wait for a prefix, not for a place
            bench.engine.submit([tools.request("in time", [1])])

    tools.run_engine(test, max_num_seqs=32, max_queue_delay=5.0, max_num_batched_tokens=64)
