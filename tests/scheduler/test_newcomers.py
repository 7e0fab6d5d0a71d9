"""A step waits a moment for requests about to come, where that is worth it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest

from scheduler import newcomers
from scheduler.newcomers import TRY_EVERY, Newcomers

LONG_STEP = 0.1


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that ends early is told from one that does not, however busy the machine is."""
    monkeypatch.setattr(newcomers, "EXPECTED_SECONDS", 0.4)
    monkeypatch.setattr(newcomers, "RETURN_SECONDS", 0.04)


def seconds_of(wait: Callable[[Newcomers], Awaitable[None]], known: Newcomers | None = None) -> float:
    async def main() -> float:
        about = Newcomers() if known is None else known
        began = time.monotonic()
        await wait(about)
        return time.monotonic() - began

    return asyncio.run(main())


def test_with_nobody_to_wait_for_it_does_not_wait() -> None:
    def expected_and_come(about: Newcomers) -> Awaitable[None]:
        about.expect()
        about.came()
        about.came()  # one that was not expected
        return about.wait(0, LONG_STEP)

    assert seconds_of(lambda about: about.wait(0, LONG_STEP)) < 0.01
    assert seconds_of(expected_and_come) < 0.01
    assert seconds_of(lambda about: about.wait(1, 0.01)) < 0.01, "a short step is not worth it"


def test_those_expected_are_waited_for_until_they_come() -> None:
    async def wait(about: Newcomers) -> None:
        about.expect()
        about.expect()
        for delay in (0.01, 0.05):
            asyncio.get_running_loop().call_later(delay, about.came)
        await about.wait(0, 0.0)

    assert 0.05 <= seconds_of(wait) < 0.3


def test_those_who_do_not_come_cost_one_wait_at_most() -> None:
    async def wait(about: Newcomers) -> None:
        about.expect()
        await about.wait(0, 0.0)

    about = Newcomers()
    assert seconds_of(wait, about) >= 0.39
    assert seconds_of(lambda about: about.wait(0, 0.0), about) < 0.1

    async def later(about: Newcomers) -> None:
        about.expect()
        await asyncio.sleep(0.4)  # idle meanwhile: whoever was expected has been refused
        began = time.monotonic()
        await about.wait(0, 0.0)
        assert time.monotonic() - began < 0.1

    seconds_of(later)


def test_returns_are_waited_for_while_they_come_and_tried_again_when_they_have_not() -> None:
    async def waits(about: Newcomers, *, comes: bool) -> bool:
        began = time.monotonic()
        if comes:
            asyncio.get_running_loop().call_later(0.001, about.came)
        await about.wait(1, LONG_STEP)
        return time.monotonic() - began > 0.039

    async def all_in_turn(about: Newcomers) -> None:
        assert [await waits(about, comes=True) for _ in range(5)].count(True) <= 1
        waited = [await waits(about, comes=False) for _ in range(11 + 3 * TRY_EVERY)]
        assert all(waited[:10])
        assert sum(waited[11:]) == 3
        for _ in range(4 * TRY_EVERY):
            await waits(about, comes=True)
        assert await waits(about, comes=False), "worth it again"

    seconds_of(all_in_turn)


def test_one_that_asks_again_when_it_is_answered_is_in_the_next_step(tools: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(newcomers, "RETURN_SECONDS", 0.5)
    admitted = []

    async def test(bench: Any) -> None:
        def before(batch: Any) -> None:
            bench.clock.now += 2.0

        bench.runner.before = before
        (other,) = bench.engine.submit([tools.request("other", [9], max_tokens=40)])
        for i in range(5):
            (stream,) = bench.engine.submit([tools.request(f"r{i}", [i + 1], max_tokens=2)])
            await tools.read(stream)
            await asyncio.sleep(0.005)
        await tools.read(other)
        steps = {name: record.number for record in bench.records for name in record.admitted}
        admitted.extend(steps[f"r{i}"] for i in range(5))

    tools.run_engine(test)
    assert [after - before for before, after in pairwise(admitted)] == [2] * 4


def test_a_refused_one_of_long_ago_is_not_waited_for_with_the_next() -> None:
    async def wait(about: Newcomers) -> None:
        about.expect()
        await asyncio.sleep(0.4)
        about.expect()
        about.came()
        began = time.monotonic()
        await about.wait(0, 0.0)
        assert time.monotonic() - began < 0.1

    seconds_of(wait)


def test_no_step_begins_when_the_engine_is_stopped_in_a_wait(tools: Any) -> None:
    async def test(bench: Any) -> None:
        bench.engine.check_room("", 1, 0)
        bench.engine.check_room("", 1, 0)  # does not come
        (stream,) = bench.engine.submit([tools.request("r", [1])])
        await asyncio.sleep(0.05)
        await bench.engine.stop()
        (answer,) = (await tools.read(stream)).values()
        assert (bench.runner.steps, answer.finish_reason) == (0, "error")
        bench.assert_baseline()

    tools.run_engine(test)
