"""A prefix is computed once: requests that need one that is being computed wait for it; choices fork from it."""

from __future__ import annotations

from typing import Any

import pytest

PREFIX = [i % 53 for i in range(200)]


def admitted(bench: Any) -> list[str]:
    return [sequence.request.id for step in bench.plans for sequence in step.admitted]


@pytest.mark.parametrize("budget", [32, 64, 1000])
def test_64_simultaneous_requests_with_one_new_prefix_compute_it_once(tools: Any, budget: int) -> None:
    bench = tools.Bench(num_pages=1024, max_num_seqs=64, max_num_batched_tokens=budget)
    requests = [tools.request(f"r{i}", [*PREFIX, i % 61, 2 + i // 61, 3], max_tokens=2) for i in range(64)]
    bench.submit(*requests)
    bench.run()
    optimum = len(PREFIX) + 64 * (3 + 1)
    assert bench.runner.rows <= optimum + 4  # at most one page more
    for request in requests:
        assert bench.answers(request.id)[0].text == tools.expected(request).text
    assert sum(bench.answers(r.id)[0].cached_tokens >= 200 for r in requests) == 63
    bench.assert_baseline()


def test_the_prefix_is_computed_again_by_each_when_caching_is_off(tools: Any) -> None:
    bench = tools.Bench(num_pages=1024, prefix_caching=False, max_num_batched_tokens=1000)
    bench.submit(*[tools.request(f"r{i}", [*PREFIX, i], max_tokens=1) for i in range(4)])
    bench.run()
    assert bench.runner.rows == 4 * 201


def test_those_held_back_stop_nobody_else(tools: Any) -> None:
    bench = tools.Bench(num_pages=1024, max_num_batched_tokens=150)
    bench.submit(tools.request("leader", PREFIX), tools.request("held", [*PREFIX, 1]))
    bench.submit(tools.request("other", range(1, 210)))
    assert bench.step().waiting_reasons == {"budget": 2}
    assert bench.step().waiting_reasons == {"prefix": 1}
    bench.run()
    assert admitted(bench) == ["leader", "other", "held"]


@pytest.mark.parametrize("option", ["namespace", "short", "scored"])
def test_what_cannot_be_shared_is_not_waited_for(tools: Any, option: str) -> None:
    bench = tools.Bench(num_pages=1024, page_size=4, max_num_batched_tokens=500)
    second = {
        "namespace": tools.request("second", PREFIX, namespace="mine"),
        "short": tools.request("second", [*PREFIX[:4], 60]),
        "scored": tools.request("second", PREFIX, prompt_logprobs=0),
    }[option]
    bench.submit(tools.request("first", PREFIX), second)
    bench.step()
    assert sorted(admitted(bench)) == ["first", "second"]


def test_a_cached_prefix_is_not_waited_for(tools: Any) -> None:
    bench = tools.Bench(num_pages=1024)
    bench.submit(tools.request("warm", PREFIX, max_tokens=1))
    bench.run()
    bench.submit(*[tools.request(f"r{i}", [*PREFIX, i, i, i, i, i, i]) for i in range(3)])
    bench.step()
    assert admitted(bench)[1:] == ["r0", "r1", "r2"]


def test_when_the_one_computing_the_prefix_is_cancelled_the_next_takes_over(tools: Any) -> None:
    bench = tools.Bench(num_pages=1024, max_num_batched_tokens=50)
    requests = [tools.request(f"r{i}", [*PREFIX, i]) for i in range(4)]
    bench.submit(*requests)
    bench.step()
    bench.requests.end("r0", None, "cancelled")
    bench.step()
    assert admitted(bench) == ["r0", "r1"]
    bench.run()
    # What the first had computed was not lost, and the rest of the prefix was computed once.
    assert bench.runner.rows <= len(PREFIX) + 3 * 8 + 4
    for request in requests[1:]:
        assert bench.answers(request.id)[0].text == tools.expected(request).text


def test_what_others_have_cached_meanwhile_is_not_waited_for(tools: Any) -> None:
    bench = tools.Bench(num_pages=1024, max_num_batched_tokens=150, max_scored_rows=100)
    bench.submit(tools.request("quick", PREFIX, prompt_logprobs=0), tools.request("slow", PREFIX))
    bench.step()
    bench.step()
    assert bench.plans[-1].sequences[1].computed == 100
    bench.submit(tools.request("third", PREFIX))
    assert bench.step().waiting_reasons == {}
    bench.run()
    assert bench.answers("third")[0].text == tools.expected(tools.request("third", PREFIX)).text


def test_a_chain_of_urgent_neighbours_cannot_hold_a_request_back_for_ever(tools: Any) -> None:
    bench = tools.Bench(num_pages=1024, max_num_batched_tokens=32, policy="priority")
    bench.submit(tools.request("leader0", [*PREFIX[:30], 60]), tools.request("victim", PREFIX))
    for i in range(1, 12):
        bench.step()
        bench.submit(tools.request(f"leader{i}", [*PREFIX[: 30 + 10 * i], 60], priority=-i, max_tokens=1))
    held = sum("prefix" in step.waiting_reasons for step in bench.plans)
    assert 4 < held <= 8
    bench.run()
    assert bench.answers("victim")[0].text == tools.expected(tools.request("victim", PREFIX)).text


def test_a_queue_too_long_to_look_at_in_one_step_is_looked_at_in_several(tools: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("scheduler.plan.MAX_LOOKS", 3)
    bench = tools.Bench(num_pages=1024, max_num_seqs=20, max_num_batched_tokens=201)
    bench.submit(*[tools.request(f"r{i}", [*PREFIX, i, i], max_tokens=1) for i in range(10)])
    assert bench.step().waiting_reasons == {"budget": 9}
    bench.submit(tools.request("other", [9], max_tokens=1))
    assert bench.step().waiting_reasons == {"queue": 7}  # three have been looked at, and run
    bench.run()
    assert bench.runner.rows <= len(PREFIX) + 10 * 2 + 4 + 1


def test_choices_share_one_computation_of_the_prompt(tools: Any) -> None:
    bench = tools.Bench(num_pages=1024)
    request = tools.request("r", PREFIX, n=5, temperature=1.0, max_tokens=6)
    bench.submit(request)
    bench.run()
    assert bench.runner.rows == len(PREFIX) + 5 * 5
    answers = bench.answers("r")
    assert [answers[i].text for i in range(5)] == [tools.expected(request, i).text for i in range(5)]
    assert len({tuple(answer.tokens) for answer in answers.values()}) == 5
    bench.assert_baseline()


def test_choices_without_a_slot_follow_through_the_prefix_cache(tools: Any) -> None:
    bench = tools.Bench(num_pages=1024, max_num_seqs=3)
    request = tools.request("r", PREFIX, n=8, temperature=1.0, max_tokens=6, logprobs=1)
    bench.submit(request)
    bench.step()
    assert (bench.state.num_running, bench.state.num_waiting) == (3, 5)
    bench.run()
    assert bench.runner.rows <= len(PREFIX) + 8 * 6 + 5 * 4
    answers = bench.answers("r")
    assert [answers[i].text for i in range(8)] == [tools.expected(request, i).text for i in range(8)]


def test_choices_that_the_store_has_no_room_to_fork_are_admitted_later(tools: Any) -> None:
    bench = tools.Bench(num_pages=1024, max_num_seqs=4, max_sequences=2)
    request = tools.request("r", PREFIX, n=4, temperature=1.0, max_tokens=6)
    bench.submit(request)
    bench.run()
    answers = bench.answers("r")
    assert [answers[i].text for i in range(4)] == [tools.expected(request, i).text for i in range(4)]
    bench.assert_baseline()


def test_choices_survive_the_preemption_of_their_unfinished_prompt(tools: Any) -> None:
    bench = tools.Bench(page_size=4, num_pages=14, max_num_batched_tokens=4)
    senior = tools.request("senior", range(8), max_tokens=30)
    choices = tools.request("choices", range(30, 54), n=3, temperature=1.0, max_tokens=6)
    bench.submit(senior)
    bench.step()
    bench.submit(choices)
    bench.run()
    assert any(s.request.id == "choices" for step in bench.plans for s, _ in step.preempted)
    answers = bench.answers("choices")
    assert [answers[i].text for i in range(3)] == [tools.expected(choices, i).text for i in range(3)]
    bench.assert_baseline()


def test_a_choice_whose_first_token_ends_it_does_not_take_the_others_with_it(tools: Any) -> None:
    request = tools.request("r", PREFIX, n=4, temperature=1.0, max_tokens=6)
    first = tools.expected(request, 0).tokens[0]
    request = tools.request("r", PREFIX, n=4, temperature=1.0, max_tokens=6, stop_token_ids=(first,))
    bench = tools.Bench(num_pages=1024, max_num_seqs=2)
    bench.submit(request)
    bench.run()
    answers = bench.answers("r")
    assert (answers[0].tokens, answers[0].finish_reason, answers[0].stop_token) == ([], "stop", first)
    assert [answers[i].text for i in range(4)] == [tools.expected(request, i).text for i in range(4)]


def test_stopping_choice_0_before_its_prompt_is_computed_leaves_the_others(tools: Any) -> None:
    bench = tools.Bench(num_pages=1024, max_num_batched_tokens=50)
    request = tools.request("r", PREFIX, n=3, temperature=1.0)
    bench.submit(request)
    bench.step()
    bench.requests.end("r", 0, "stop")
    bench.run()
    answers = bench.answers("r")
    assert (answers[0].tokens, answers[0].finish_reason) == ([], "stop")
    assert [answers[i].text for i in (1, 2)] == [tools.expected(request, i).text for i in (1, 2)]
    bench.assert_baseline()
