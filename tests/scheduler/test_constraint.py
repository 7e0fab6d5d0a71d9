"""Constraints on what a choice may say: masks reach the rows they are for, and errors reach nobody else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from models.base import Batch
from scheduler.errors import ConstraintFailed, NothingAllowed


@pytest.mark.parametrize("tells", ["at once", "when asked"])
def test_a_choice_ends_by_itself_when_nothing_may_follow(tools: Any, tells: str) -> None:
    bench = tools.Bench()
    request = tools.request("r", range(9), max_tokens=30, min_tokens=20, n=3, constraint=tools.Rule(7, tells))
    bench.submit(request)
    bench.run()
    for index, answer in bench.answers("r").items():
        assert (len(answer.tokens), answer.finish_reason, answer.stop_token) == (7, "stop", None)
        assert answer.text == tools.expected(request, index).text
    assert request.constraint.tokens == []
    bench.assert_baseline()


def test_an_eos_token_that_is_all_that_is_allowed_ends_the_choice(tools: Any) -> None:
    bench = tools.Bench()
    bench.submit(tools.request("r", range(9), max_tokens=30, ignore_eos=False, constraint=tools.Rule(4, "never")))
    bench.run()
    answer = bench.answers("r")[0]
    assert (len(answer.tokens), answer.finish_reason, answer.stop_token) == (4, "stop", tools.EOS)


def test_the_last_token_of_a_constraint_and_of_the_limit_at_once_is_a_stop(tools: Any) -> None:
    bench = tools.Bench()
    for name, length in (("exact", 5), ("cut", 6)):
        bench.submit(tools.request(name, range(9), max_tokens=5, constraint=tools.Rule(length)))
    bench.run()
    assert [bench.answers(name)[0].finish_reason for name in ("exact", "cut")] == ["stop", "length"]


@pytest.mark.case(17)
def test_a_constraint_keeps_its_place_through_preemption(tools: Any) -> None:
    bench = tools.Bench(page_size=4, num_pages=12, max_num_seqs=8)
    requests = [
        tools.request(f"r{i}", [i, 9, i, 11, 5], max_tokens=30, temperature=i % 2, constraint=tools.Rule(25))
        for i in range(8)
    ]
    bench.submit(*requests)
    bench.run()
    assert sum(len(step.preempted) for step in bench.plans) > 3
    for request in requests:
        assert bench.answers(request.id)[0].text == tools.expected(request).text


def test_only_constrained_rows_have_a_mask_and_without_any_there_is_none(tools: Any) -> None:
    bench = tools.Bench()
    seen: list[Batch] = []
    bench.runner.before = seen.append
    bench.submit(tools.request("plain", range(5), max_tokens=1))
    bench.run()
    assert seen[-1].sampling.mask is None
    bench.submit(
        tools.request("scored", range(5), max_tokens=1, prompt_logprobs=0, constraint=tools.Rule(2)),
        tools.request("plain", range(7), max_tokens=1),
        tools.request("constrained", range(9), max_tokens=1, constraint=tools.Rule(2)),
    )
    bench.run()
    sampling = seen[-1].sampling
    assert sampling.mask is not None
    assert sampling.mask_row is not None
    sampled = sampling.target < 0
    assert (sampling.mask_row[~sampled] == -1).all()
    assert sorted(sampling.mask_row[sampled].tolist()) == [-1, 0, 1]
    assert sampling.mask.shape == (2, -(-tools.VOCAB // 32))
    assert (np.bitwise_count(sampling.mask).sum(axis=1) == len(tools.Rule(1).allowed())).all()


def test_a_constraint_that_raises_fails_its_own_request_only(tools: Any) -> None:
    async def test(bench: Any) -> None:
        broken = tools.Rule(20)
        broken.broken_after = 3
        crashing = tools.Rule(20)
        crashing.accept = crashing.fork = None
        requests = [
            tools.request("broken", range(6), max_tokens=9, constraint=broken),
            tools.request("crashing", range(8), max_tokens=9, constraint=crashing),
            tools.request("fine", range(7), max_tokens=9, constraint=tools.Rule(5)),
            tools.request("plain", range(5), max_tokens=9),
        ]
        streams = bench.engine.submit(requests)
        answers = [(await tools.read(stream))[0] for stream in streams]
        assert isinstance(answers[0].error, ConstraintFailed)
        assert len(answers[0].tokens) == 3
        assert answers[1].finish_reason == "error"
        for request, answer in zip(requests[2:], answers[2:], strict=True):
            assert answer.text == tools.expected(request).text
        bench.assert_baseline()

    tools.run_engine(test)


def test_a_constraint_that_allows_nothing_is_told_from_a_broken_model(tools: Any) -> None:
    bench = tools.Bench()
    rule = tools.Rule(3)
    nothing = type("Nothing", (tools.Rule,), {"allowed": lambda self: set(), "fork": lambda self: nothing(3)})
    bench.submit(tools.request("r", range(5), constraint=nothing(3)), tools.request("s", range(6), constraint=rule))
    bench.run()
    assert isinstance(bench.answers("r")[0].error, NothingAllowed)
    assert bench.answers("s")[0].finish_reason == "stop"
