"""What runs next: order, budget, admission and preemption, without an engine."""

from __future__ import annotations

from typing import Any

import pytest


def names(sequences: Any) -> list[str]:
    return [sequence.request.id for sequence in sequences]


def rows(planned: Any) -> dict[str, int]:
    return {s.request.id: count for s, count in zip(planned.sequences, planned.rows, strict=True)}


def test_a_long_prompt_is_computed_in_chunks_of_the_budget(tools: Any) -> None:
    bench = tools.Bench(max_num_batched_tokens=10)
    bench.submit(tools.request("long", range(25)))
    assert [rows(bench.step())["long"] for _ in range(4)] == [10, 10, 5, 1]


def test_decode_rows_come_before_prompt_chunks(tools: Any) -> None:
    bench = tools.Bench(max_num_batched_tokens=8)
    bench.submit(tools.request("a", [1], max_tokens=50), tools.request("b", [2], max_tokens=50))
    bench.step()
    bench.submit(tools.request("long", range(40)))
    for _ in range(6):
        assert rows(bench.step()) == {"a": 1, "b": 1, "long": 6}


def test_prompts_leave_most_of_a_step_to_drafts_while_others_decode(tools: Any) -> None:
    bench = tools.Bench(max_num_batched_tokens=20, max_prefill_beside=4)
    bench.submit(tools.request("long", range(30)))
    assert rows(bench.step()) == {"long": 20}  # nobody waits for it
    bench.submit(tools.request("short", [1], max_tokens=50))
    assert rows(bench.step()) == {"long": 10, "short": 1}
    bench.submit(tools.request("longer", range(50, 66)))
    assert [rows(bench.step()) for _ in range(2)] == [{"long": 1, "short": 1, "longer": 4}] * 2
    assert bench.plans[-1].spare == 20 - 6


def test_a_prompt_is_ended_beyond_the_bound(tools: Any) -> None:
    bench = tools.Bench(max_num_batched_tokens=20, max_prefill_beside=4)
    bench.submit(tools.request("decodes", [1], max_tokens=50))
    bench.step()
    bench.submit(tools.request("ends", range(50, 57)))
    assert rows(bench.step()) == {"decodes": 1, "ends": 7}
    bench.submit(tools.request("longer", range(60, 69)))
    assert rows(bench.step()) == {"decodes": 1, "ends": 1, "longer": 2}


def test_who_decodes_bears_so_many_rows_of_prompts_for_each_of_its_tokens(tools: Any) -> None:
    bench = tools.Bench(max_num_batched_tokens=40, max_prefill_beside=6, prefix_caching=False, num_pages=1024)
    bench.submit(tools.request("decodes", [1], max_tokens=40))
    bench.step()
    bench.submit(*[tools.request(f"prompt{i}", [7] * 100, max_tokens=1) for i in range(4)])
    taken = [sum(rows(bench.step()).values()) - 1 for _ in range(30)]
    assert taken == [6, 6, 4, *[2] * 27]  # twice the bound, and three eighths of it for each token


def test_steps_of_many_rows_of_prompts_are_filled_to_what_the_kernels_compute_at_a_time(tools: Any) -> None:
    bench = tools.Bench(max_num_batched_tokens=512, max_prefill_beside=192, prefix_caching=False, num_pages=1024)
    bench.submit(*[tools.request(f"decodes{i}", [i], max_tokens=40) for i in range(3)])
    bench.step()
    bench.submit(*[tools.request(f"long{i}", [7] * 500, max_tokens=1) for i in range(3)])
    taken = [sum(rows(bench.step()).values()) for _ in range(6)]
    assert taken == [192, 192, 160, 80, 80, 80]  # three of them decode; 195, 195, 153 and 75 are due, and 192 the most


def test_a_prompt_under_way_comes_before_waiting_prompts_that_are_as_long(tools: Any) -> None:
    bench = tools.Bench(max_num_batched_tokens=8)
    bench.submit(tools.request("first", range(20)), tools.request("second", range(50, 70)))
    assert [rows(bench.step()) for _ in range(3)] == [{"first": 8}, {"first": 8}, {"first": 4, "second": 4}]


def test_a_shorter_prompt_passes_a_long_one_which_goes_on_meanwhile(tools: Any) -> None:
    bench = tools.Bench(max_num_batched_tokens=16, prefix_caching=False)
    bench.submit(tools.request("long", [7] * 200, max_tokens=1))
    assert rows(bench.step()) == {"long": 16}
    for i in range(14):  # others come and come
        bench.submit(tools.request(f"short{i}", [8] * 12, max_tokens=1))
        assert rows(bench.step()) == {"long": 4, f"short{i}": 12}
    for i in range(
        8
    ):  # there have been as many rows as it has itself, and eight steps more; the short ones are due later
        bench.submit(tools.request(f"more{i}", [8] * 12, max_tokens=1))
        assert rows(bench.step()) == {"long": 16}


def test_of_those_who_come_at_once_the_shortest_is_let_in_first_and_owners_keep_their_places(tools: Any) -> None:
    bench = tools.Bench(max_num_batched_tokens=16, prefix_caching=False)
    lengths = {"long": 40, "short": 8, "middle": 20}
    bench.submit(*[tools.request(name, [7] * length, owner="a") for name, length in lengths.items()])
    bench.submit(*[tools.request(f"{name} of b", [7] * length, owner="b") for name, length in lengths.items()])
    bench.run()
    order = [name for step in bench.plans for name in names(step.admitted)]
    for owner in ("", " of b"):
        assert [name for name in order if (" of b" in name) == bool(owner)] == [
            f"{name}{owner}" for name in ("short", "middle", "long")
        ]
    assert order[:2] == ["short", "short of b"]


@pytest.mark.parametrize(
    ("limits", "short"),
    [
        ({"max_num_seqs": 4, "num_pages": 64}, {"n": 4}),  # takes all slots
        ({"num_pages": 12}, {}),  # takes the page that is left over
        ({"max_num_batched_tokens": 3, "max_num_seqs": 5, "num_pages": 512}, {}),  # takes all rows
    ],
    ids=["slots", "pages", "rows"],
)
def test_a_long_prompt_is_let_in_whatever_the_short_ones_take_that_come_after_it(
    tools: Any, limits: dict[str, Any], short: dict[str, Any]
) -> None:
    bench = tools.Bench(**limits)
    if "max_num_batched_tokens" in limits:
        bench.submit(*[tools.request(f"decodes{i}", [i + 10], max_tokens=400) for i in range(2)])
        bench.step()
    bench.submit(tools.request("cached", [8] * 5, max_tokens=1))
    bench.step()
    bench.submit(tools.request("long", [7] * 39, max_tokens=1))
    for i in range(100):  # each waits beside it, and needs one row: the others are cached
        if f"short{i - 1}" not in bench.requests:
            bench.submit(tools.request(f"short{i}", [8] * 5, max_tokens=1, **short))
        if "long" in names(bench.step().admitted):
            return
    raise AssertionError("it still waits")


def test_a_prompt_between_long_ones_and_a_stream_of_short_ones_is_not_held_up_for_long(tools: Any) -> None:
    bench = tools.Bench(max_num_batched_tokens=16, max_num_seqs=16, prefix_caching=False)
    bench.submit(*[tools.request(f"long{i}", [7] * 200, max_tokens=1) for i in range(2)])
    bench.step()
    bench.submit(tools.request("between", [9] * 40, max_tokens=1))
    for i in range(8):
        bench.submit(tools.request(f"short{i}", [8] * 12, max_tokens=1))
        bench.step()
    assert "between" not in bench.requests
    assert "long0" in bench.requests


def test_what_is_kept_for_a_waiting_prompt_that_cannot_come_in_goes_to_those_that_run(tools: Any) -> None:
    bench = tools.Bench(page_size=4, num_pages=7, max_num_batched_tokens=8, prefix_caching=False)
    bench.submit(tools.request("first", range(24), max_tokens=4))
    assert rows(bench.step()) == {"first": 8}
    bench.submit(tools.request("second", range(50, 58), max_tokens=20))
    assert [rows(bench.step()) for _ in range(2)] == [{"first": 8}] * 2
    assert [step.waiting_reasons for step in bench.plans[1:]] == [{"pages": 1}] * 2


def test_no_more_than_max_num_seqs_run_and_the_first_come_first(tools: Any) -> None:
    bench = tools.Bench(max_num_seqs=2)
    bench.submit(*[tools.request(f"r{i}", [i], max_tokens=2) for i in range(5)])
    assert names(bench.step().admitted) == ["r0", "r1"]
    assert bench.plans[-1].waiting_reasons == {"slots": 3}
    bench.step()
    assert names(bench.step().admitted) == ["r2", "r3"]


def test_priority_decides_under_its_policy_only(tools: Any) -> None:
    for policy, order in (("priority", ["urgent", "early", "late"]), ("fcfs", ["early", "late", "urgent"])):
        bench = tools.Bench(max_num_seqs=1, policy=policy)
        bench.submit(
            tools.request("early", [1], max_tokens=1),
            tools.request("late", [2], max_tokens=1),
            tools.request("urgent", [3], max_tokens=1, priority=-1),
        )
        bench.run()
        assert [names(step.admitted)[0] for step in bench.plans] == order


def test_a_more_urgent_request_takes_the_slot_of_the_least_urgent_and_latest(tools: Any) -> None:
    bench = tools.Bench(max_num_seqs=2, policy="priority")
    requests = [tools.request(f"r{i}", [i], max_tokens=9, priority=1) for i in range(2)]
    urgent = tools.request("urgent", [9], max_tokens=9, priority=0)
    bench.submit(*requests)
    bench.step()
    bench.submit(urgent)
    planned = bench.step()
    assert names(s for s, _ in planned.preempted) == ["r1"]
    assert set(rows(planned)) == {"r0", "urgent"}
    bench.submit(tools.request("equal", [8], max_tokens=9, priority=1))
    assert not bench.step().preempted
    bench.run()
    for request in (*requests, urgent):
        assert bench.answers(request.id)[0].text == tools.expected(request).text


def test_a_more_urgent_request_takes_the_pages_of_less_urgent_ones(tools: Any) -> None:
    bench = tools.Bench(page_size=4, num_pages=10, policy="priority", prefix_caching=False)
    bench.submit(tools.request("a", range(12), priority=2), tools.request("b", range(20, 28), priority=1))
    bench.step()
    bench.submit(tools.request("urgent", range(40, 60)))
    planned = bench.step()
    assert names(s for s, _ in planned.preempted) == ["a"]
    assert "urgent" in rows(planned)
    bench.run()
    bench.assert_baseline()


def test_the_latest_is_preempted_even_when_the_earliest_asks(tools: Any) -> None:
    bench = tools.Bench(page_size=4, num_pages=10, prefix_caching=False)
    requests = [tools.request(f"r{i}", range(i, i + 7), max_tokens=20) for i in range(3)]
    bench.submit(*requests)
    first_out = next(step for step in iter(bench.step, None) if step.preempted)
    assert names(s for s, _ in first_out.preempted)[0] == "r2"
    bench.run()
    finished = [life.id for life in reversed(list(bench.journal.lives()))]
    assert finished == ["r0", "r1", "r2"]


def test_two_that_cannot_both_fit_do_not_preempt_each_other_for_ever(tools: Any) -> None:
    bench = tools.Bench(page_size=4, num_pages=16)  # 64 tokens: one of them at a time
    requests = [tools.request(f"r{i}", range(i, i + 20), max_tokens=40) for i in range(2)]
    bench.submit(*requests)
    steps = bench.run(steps=200)
    assert steps < 100
    assert {s.request.id for step in bench.plans for s, _ in step.preempted} == {"r1"}
    assert sum(len(step.preempted) for step in bench.plans) <= 4
    for request in requests:
        assert bench.answers(request.id)[0].text == tools.expected(request).text


def test_a_sequence_that_could_not_grow_next_to_the_others_is_not_admitted(tools: Any) -> None:
    bench = tools.Bench(page_size=4, num_pages=9, prefix_caching=False)
    bench.submit(tools.request("senior", range(20), max_tokens=12))
    bench.step()
    bench.step()
    bench.submit(tools.request("junior", range(30, 38), max_tokens=4))  # 2 of 3 free pages, and both will want one more
    assert bench.step().waiting_reasons == {"pages": 1}
    bench.run()
    assert not any(step.preempted for step in bench.plans)


def test_a_resumed_sequence_counts_as_a_prompt_until_it_has_caught_up(tools: Any) -> None:
    bench = tools.Bench(page_size=4, num_pages=10, max_num_batched_tokens=4, prefix_caching=False)
    requests = [tools.request(f"r{i}", range(i, i + 6), max_tokens=20) for i in range(2)]
    bench.submit(*requests)
    bench.run()
    assert any(step.preempted for step in bench.plans)
    for request in requests:
        assert bench.answers(request.id)[0].text == tools.expected(request).text


def test_a_large_request_is_not_overtaken_by_small_ones_behind_it(tools: Any) -> None:
    bench = tools.Bench(page_size=4, num_pages=16)
    bench.submit(tools.request("running", range(20), max_tokens=4))
    bench.step()
    bench.submit(tools.request("large", range(30, 75), max_tokens=2))
    bench.submit(*[tools.request(f"small{i}", [i], max_tokens=2) for i in range(10)])
    planned = bench.step()
    assert planned.admitted == []
    assert planned.waiting_reasons == {"pages": 11}
    bench.run()
    admitted = [name for step in bench.plans for name in names(step.admitted)]
    assert admitted[:2] == ["running", "large"]


def test_those_who_decode_get_a_row_in_every_step_of_a_long_prefill(tools: Any) -> None:
    bench = tools.Bench(max_num_batched_tokens=16, num_pages=512)
    decoding = [f"d{i}" for i in range(6)]
    bench.submit(*[tools.request(name, [i], max_tokens=200) for i, name in enumerate(decoding)])
    bench.step()
    bench.submit(tools.request("long", [5] * 300, max_tokens=1))
    for _ in range(30):
        planned = rows(bench.step())
        assert all(planned[name] == 1 for name in decoding)
        assert planned["long"] == 10


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_nobody_starves_when_the_budget_is_smaller_than_the_number_running(tools: Any, budget: int) -> None:
    bench = tools.Bench(max_num_batched_tokens=budget)
    bench.submit(*[tools.request(f"r{i}", range(i, i + 5), max_tokens=10) for i in range(8)])
    total = 8 * (5 + 9)
    assert bench.run() <= -(-total // budget) + 8


@pytest.mark.case(30)
def test_prompt_rows_with_logprobs_have_a_bound_of_their_own(tools: Any) -> None:
    bench = tools.Bench(max_scored_rows=8)
    bench.submit(
        tools.request("a", range(20), prompt_logprobs=0, max_tokens=1),
        tools.request("b", range(20), prompt_logprobs=0, max_tokens=1),
        tools.request("plain", range(30, 40), max_tokens=20),
    )
    for _ in range(6):
        planned = rows(bench.step())
        assert planned.get("a", 0) + planned.get("b", 0) <= 8
    bench.run()
    assert len(bench.answers("b")[0].prompt_logprobs) == 19


def test_a_request_that_cannot_be_admitted_fails_alone(tools: Any) -> None:
    bench = tools.Bench()
    bench.submit(
        tools.request("good", [1, 2]),
        tools.request("bad", [3, 4], logit_bias=((tools.VOCAB, 1.0),)),
        tools.request("better", [5, 6]),
    )
    with pytest.raises(AssertionError, match=r"bad/0.*outside the vocabulary"):
        bench.step()
    planned = bench.plans[-1]
    assert names(planned.admitted) == ["good", "better"]
    assert names(s for s, _ in planned.failed) == ["bad"]
    assert bench.kv.stats().sequences == 2


def test_the_same_state_gives_the_same_plan(tools: Any) -> None:
    def history() -> list[Any]:
        bench = tools.Bench(page_size=4, num_pages=24)
        bench.submit(*[tools.request(f"r{i}", range(i % 3, 30), n=1 + i % 3, max_tokens=9) for i in range(12)])
        bench.run()
        return [(names(p.sequences), p.rows, names(p.admitted), p.waiting_reasons) for p in bench.plans]

    assert history() == history()


def test_nothing_to_do_is_an_empty_plan(tools: Any) -> None:
    planned = tools.Bench().step()
    assert (planned.sequences, planned.rows, planned.waiting_reasons) == ([], [], {})
