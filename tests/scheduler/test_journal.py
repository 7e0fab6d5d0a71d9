"""What can be asked afterwards: the last steps, and a request's life."""

from __future__ import annotations

from typing import Any

from scheduler.journal import MAX_EVENTS, Journal, RequestLife


def test_a_step_record_says_what_ran_and_what_it_cost(tools: Any) -> None:
    async def test(bench: Any) -> None:
        streams = bench.engine.submit(
            [tools.request("one", range(30), max_tokens=2), tools.request("other", range(1, 32), max_tokens=2)]
        )
        for stream in streams:
            await tools.read(stream)
        await bench.engine.until_idle()
        first, second, third, *_ = bench.records
        assert (first.number, first.rows, first.prefill_tokens, first.decode_rows) == (1, 20, 20, 0)
        assert (first.admitted, first.sequences) == (("one",), (("one", 0, 20),))
        assert (first.running, first.waiting, first.waiting_reasons) == (1, 1, {"budget": 1})
        assert (second.rows, second.prefill_tokens, second.sampled_tokens) == (20, 20, 1)
        assert (third.rows, third.prefill_tokens, third.decode_rows, third.finished) == (20, 19, 1, 1)
        assert (first.context_tokens, first.attended_tokens) == (20, sum(range(1, 21)))
        assert (second.context_tokens, second.attended_tokens) == (40, sum(range(21, 31)) + sum(range(1, 11)))
        assert first.pages_free + first.pages_evictable + first.pages_used == 256
        assert first.pages_used >= 8
        assert list(bench.engine.journal.steps) == bench.records

    tools.run_engine(test, max_num_batched_tokens=20)


def test_phases_are_timed_by_the_engines_clock(tools: Any) -> None:
    async def test(bench: Any) -> None:
        def advance(batch: Any) -> None:
            bench.clock.now += 2.0

        bench.runner.before = advance
        (stream,) = bench.engine.submit([tools.request("r", [1], max_tokens=1)])
        await tools.read(stream)
        await bench.engine.until_idle()
        (record,) = bench.records
        assert (record.time, record.plan_seconds, record.run_seconds, record.apply_seconds) == (100.0, 0.0, 2.0, 0.0)

    tools.run_engine(test)


def test_a_requests_life_tells_why_it_waited_what_it_reused_and_how_it_ended(tools: Any) -> None:
    async def test(bench: Any) -> None:
        prefix = list(range(24))
        for name, prompt in (("warm", prefix), ("senior", [50, 51, 52]), ("junior", [*prefix, 9])):
            (stream,) = bench.engine.submit([tools.request(name, prompt, max_tokens=16, arrival=90.0)])
            if name == "warm":
                await tools.read(stream)
        await bench.engine.until_idle()
        life = bench.engine.journal.life("junior")
        events = [(event.kind, event.detail) for event in life.events]
        assert events[0] == ("queued", {"ahead": 1, "running": 0})
        assert events[1] == ("waits", {"reason": "slots"})
        assert events[2] == ("admitted", {"cached": 24, "tokens": 25, "pages": 7})
        assert events[3] == ("first token", {})
        assert events[-1] == ("finished", {"reason": "length", "output_tokens": 16})
        assert (life.cached_tokens, life.output_tokens, life.finish_reasons) == (24, 16, ["length"])
        assert (life.arrival, life.prompt_tokens, life.finished_at) == (90.0, 25, 100.0)

    tools.run_engine(test, max_num_seqs=1)


def test_a_life_shows_preemptions(tools: Any) -> None:
    async def test(bench: Any) -> None:
        for stream in bench.engine.submit([tools.request(f"r{i}", range(i, i + 6), max_tokens=20) for i in range(2)]):
            await tools.read(stream)
        life = bench.engine.journal.life("r1")
        kinds = [event.kind for event in life.events]
        assert life.preemptions >= 1
        assert kinds.index("preempted") < kinds.index("resumed")
        assert bench.records[-1].number == bench.engine.steps
        assert sum(len(record.preempted) for record in bench.records) >= 1

    tools.run_engine(test, num_pages=10, page_size=4)


def test_cached_tokens_count_once_for_each_prompt(tools: Any) -> None:
    async def test(bench: Any) -> None:
        for name, n in (("cold", 1), ("warm", 3)):
            (stream,) = bench.engine.submit([tools.request(name, range(20), n=n, max_tokens=9)])
            answers = await tools.read(stream)
        assert {answer.cached_tokens for answer in answers.values()} == {19}
        await bench.engine.until_idle()
        assert sum(record.cached_tokens for record in bench.records) == 19

    tools.run_engine(test, num_pages=16, page_size=4, max_num_seqs=2)


def test_only_the_last_steps_and_requests_are_remembered(tools: Any) -> None:
    async def test(bench: Any) -> None:
        for i in range(6):
            (stream,) = bench.engine.submit([tools.request(f"r{i}", [i], max_tokens=3)])
            await tools.read(stream)
        await bench.engine.until_idle()
        assert [record.number for record in bench.engine.journal.steps] == [15, 16, 17, 18]
        assert [life.id for life in bench.engine.journal.lives()] == ["r5", "r4"]
        assert bench.engine.journal.life("r0") is None

    tools.run_engine(test, journal_steps=4, journal_requests=2)


def test_a_long_life_keeps_its_beginning_and_its_end() -> None:
    life = RequestLife("r", 1, 1, 0, 0.0)
    for i in range(1000):
        life.note(float(i), "waits", 0, i=i)
    assert [event.time for event in life.events[:8]] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert life.events[-1].time == 999
    assert len(life.events) == 8 + MAX_EVENTS
    assert life.dropped_events == 1000 - 8 - MAX_EVENTS


def test_an_id_used_again_is_one_entry(tools: Any) -> None:
    journal = Journal(4, 4)
    for arrival in (1.0, 2.0):
        journal.begin(RequestLife("same", 1, 1, 0, arrival))
        journal.end("same")
    assert [life.arrival for life in journal.lives()] == [2.0]
