"""The engine as the server meets it: streams, ends of all kinds, refusals, faults, idling and shutting down."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from scheduler.errors import (
    DuplicateRequest,
    Interrupted,
    NeverFits,
    NonFiniteLogits,
    NotAccepting,
    QueueFull,
    SequenceFailed,
    StepFailed,
)
from scheduler.request import derive_seed


async def finish(tools: Any, bench: Any, *requests: Any) -> list[Any]:
    """Submit, read everything, and give the answers of choice 0."""
    streams = bench.engine.submit(requests)
    answers = await asyncio.gather(*[tools.read(stream) for stream in streams])
    return [answer[0] for answer in answers]


@pytest.mark.case(1)
def test_concurrent_streams_get_their_own_text(tools: Any) -> None:
    async def test(bench: Any) -> None:
        for round_ in range(3):
            requests = [
                tools.request(f"{round_}.{i}", [i, *range(i % 7), 50 - i % 9], max_tokens=5 + i, temperature=1.0)
                for i in range(32)
            ]
            for request, answer in zip(requests, await finish(tools, bench, *requests), strict=True):
                assert answer.text == tools.expected(request).text
        await bench.engine.until_idle()
        bench.assert_baseline()

    tools.run_engine(test, max_num_seqs=16, num_pages=200)


@pytest.mark.case(63)
def test_finish_reasons_tell_cut_off_from_finished(tools: Any) -> None:
    natural = next(
        (seed, len(answer.tokens))
        for seed in range(1000)
        if (answer := tools.expected(tools.request("", [5], seed=seed, ignore_eos=False, max_tokens=40))).stop_token
        and len(answer.tokens) > 4
    )
    seed, length = natural

    async def test(bench: Any) -> None:
        def request(name: str, **options: Any) -> Any:
            return tools.request(name, [5], seed=seed, **{"ignore_eos": False} | options)

        cut, exact, beyond, ignoring, later, token, at_once = await finish(
            tools,
            bench,
            request("cut", max_tokens=length - 1),
            request("exact", max_tokens=length),
            request("beyond", max_tokens=length + 1),
            request("ignoring", max_tokens=length + 3, ignore_eos=True),
            request("later", max_tokens=length + 3, min_tokens=length + 2),
            request("token", max_tokens=9, stop_token_ids=(tools.expected(request("")).tokens[1],)),
            request("at_once", max_tokens=9, stop_token_ids=(tools.expected(request("")).tokens[0],)),
        )
        assert (cut.finish_reason, len(cut.tokens), cut.stop_token) == ("length", length - 1, None)
        assert (exact.finish_reason, len(exact.tokens), exact.stop_token) == ("length", length, None)
        assert (beyond.finish_reason, len(beyond.tokens), beyond.stop_token) == ("stop", length, tools.EOS)
        assert (ignoring.finish_reason, len(ignoring.tokens)) == ("length", length + 3)
        assert (later.finish_reason, len(later.tokens)) == ("length", length + 3)
        assert (token.finish_reason, len(token.tokens)) == ("stop", 1)
        assert (at_once.finish_reason, at_once.tokens) == ("stop", [])

    tools.run_engine(test)


@pytest.mark.case(63)
def test_a_context_that_is_full_ends_with_length(tools: Any) -> None:
    async def test(bench: Any) -> None:
        fits, full = (
            tools.request("fits", range(39), max_tokens=10**12),
            tools.request("full", range(10), max_tokens=99),
        )
        answers = await finish(tools, bench, fits, full)
        assert [(a.finish_reason, len(a.tokens)) for a in answers] == [("length", 1), ("length", 30)]
        assert answers[1].text == tools.expected(full, context_limit=40).text

    tools.run_engine(test, num_pages=10, page_size=4)


@pytest.mark.parametrize(("pages", "length", "limited_by"), [(10, 40, "kv_pool"), (1000, 512, "max_model_len")])
def test_what_can_never_fit_is_refused_with_the_numbers(tools: Any, pages: int, length: int, limited_by: str) -> None:
    async def test(bench: Any) -> None:
        good = tools.request("good", [1])
        with pytest.raises(NeverFits) as refused:
            bench.engine.submit([good, tools.request("bad", [2] * length)])
        assert (refused.value.prompt_tokens, refused.value.limit_tokens) == (length, length)
        assert refused.value.limited_by == limited_by
        assert str(length) in str(refused.value)
        assert bench.engine.waiting == 0  # the good one of the group was not taken either
        bench.engine.submit([good])
        await bench.engine.until_idle()

    tools.run_engine(test, num_pages=pages, page_size=4)


def test_a_queued_request_is_cancelled_at_once_and_never_prefilled(tools: Any) -> None:
    async def test(bench: Any) -> None:
        bench.hold()
        running = bench.engine.submit([tools.request(f"run{i}", [1, 2], max_tokens=40) for i in range(2)])
        await bench.in_step()
        queued = bench.engine.submit([tools.request(f"q{i}", [50, 51, 52], n=2) for i in range(50)])
        assert bench.engine.waiting == 100
        assert all(bench.engine.cancel(f"q{i}") for i in range(50))
        assert bench.engine.waiting == 0
        for stream in queued:
            answers = await tools.read(stream)
            assert {a.finish_reason for a in answers.values()} == {"cancelled"}
        bench.release()
        await asyncio.gather(*[tools.read(stream) for stream in running])
        assert bench.runner.computed[51] == 0
        assert not bench.engine.cancel("q0")

    tools.run_engine(test, max_num_seqs=2)


def test_a_running_request_is_gone_before_the_next_step_and_its_pages_are_back(tools: Any) -> None:
    async def test(bench: Any) -> None:
        stream, other = bench.engine.submit(
            [tools.request("left", range(30), n=4, max_tokens=400), tools.request("stays", [1], max_tokens=5)]
        )
        await anext(stream)
        bench.hold()
        await bench.in_step()
        used = bench.kv.stats().used
        assert bench.engine.cancel("left")
        assert bench.engine.cancel("left")  # again, while it is ending
        assert bench.kv.stats().used == used  # the step in flight still reads them
        steps = bench.runner.steps
        bench.release()
        answers = await tools.read(stream)
        assert {a.finish_reason for a in answers.values()} == {"cancelled"}
        assert (await tools.read(other))[0].finish_reason == "length"
        await bench.engine.until_idle()
        rows = [name for record in bench.records for name, _, _ in record.sequences if record.number > steps + 1]
        assert "left" not in rows
        bench.assert_baseline()

    tools.run_engine(test)


def test_what_a_step_gave_a_request_cancelled_meanwhile_is_dropped(tools: Any) -> None:
    bench = tools.Bench()
    bench.submit(tools.request("r", [1, 2, 3], max_tokens=2, n=2))
    bench.step()
    bench.runner.before = lambda batch: bench.requests.end("r", None, "cancelled")
    bench.step()
    answers = bench.answers("r")
    assert [(a.finish_reason, len(a.tokens)) for a in answers.values()] == [("cancelled", 1)] * 2


def test_a_storm_of_cancellations_leaks_nothing(tools: Any) -> None:
    rng = random.Random(5)

    async def test(bench: Any) -> None:
        heads = [[rng.randrange(60) for _ in range(40)] for _ in range(3)]
        kept = []
        for i in range(600):
            prompt = [*rng.choice(heads)[: rng.randint(1, 40)], i % 61]
            request = tools.request(f"r{i}", prompt, n=rng.choice([1, 1, 3]), max_tokens=rng.randint(1, 12))
            (stream,) = bench.engine.submit([request])
            if i % 40 == 0:
                kept.append((request, asyncio.create_task(tools.read(stream))))
            else:
                asyncio.get_running_loop().call_later(rng.random() / 50, bench.engine.cancel, request.id)
            if rng.random() < 0.5:
                await asyncio.sleep(0)
            if i % 25 == 0:
                bench.kv.check_integrity()
        for request, task in kept:
            assert (await task)[0].text == tools.expected(request).text
        await bench.engine.until_idle()
        bench.assert_baseline()
        largest = tools.request("largest", [1] * 200, max_tokens=312)
        assert (await finish(tools, bench, largest))[0].finish_reason == "length"

    tools.run_engine(test, num_pages=128, page_size=4, max_queued_requests=5000)


def test_a_choice_stopped_from_outside_ends_alone(tools: Any) -> None:
    async def test(bench: Any) -> None:
        (stream,) = bench.engine.submit([tools.request("r", [1, 2, 3], n=3, temperature=1.0, max_tokens=60)])
        seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
        reasons = {}
        async for update in stream:
            seen[update.index] += update.tokens
            if update.finish_reason:
                reasons[update.index] = update.finish_reason
            elif update.index == 1 and len(seen[1]) > 5:
                bench.engine.stop_choice("r", 1, "stop")
        assert reasons == {0: "length", 1: "stop", 2: "length"}
        assert len(seen[0]) == len(seen[2]) == 60
        assert len(seen[1]) < 15
        assert not bench.engine.stop_choice("r", 1)

    tools.run_engine(test)


@pytest.mark.case(35)
def test_the_queue_is_bounded_and_counts_every_choice(tools: Any) -> None:
    async def test(bench: Any) -> None:
        bench.hold()
        bench.engine.submit([tools.request("running", [1], n=2, max_tokens=50)])
        await bench.in_step()
        bench.engine.submit([tools.request("a", [1], n=3)])
        with pytest.raises(QueueFull) as full:
            bench.engine.submit([tools.request("b", [1]), tools.request("c", [1], n=2)])
        assert (full.value.waiting, full.value.limit, full.value.unit) == (3, 5, "requests")
        assert full.value.retry_after_seconds == 1
        assert bench.engine.waiting == 3  # nothing of the refused group
        bench.engine.submit([tools.request("b", [1]), tools.request("c", [1])])
        with pytest.raises(QueueFull):
            bench.engine.submit([tools.request("d", [1])])
        bench.engine.cancel("a")
        bench.engine.submit([tools.request("d", [1], n=3)])
        bench.release()
        await bench.engine.until_idle()

    tools.run_engine(test, max_num_seqs=2, max_queued_requests=5)


def test_a_burst_on_an_idle_engine_may_use_its_free_slots_too(tools: Any) -> None:
    async def test(bench: Any) -> None:
        burst = [tools.request(f"r{i}", [i]) for i in range(6)]
        with pytest.raises(QueueFull):
            bench.engine.submit([*burst, tools.request("r6", [1])])
        bench.engine.submit(burst)
        await bench.engine.until_idle()

    tools.run_engine(test, max_num_seqs=4, max_queued_requests=2)


def test_free_slots_do_not_count_while_somebody_waits_for_pages(tools: Any) -> None:
    async def test(bench: Any) -> None:
        bench.engine.submit([tools.request("large", range(30), max_tokens=10)])
        bench.engine.submit([tools.request("next", range(30, 60), max_tokens=10)])
        bench.hold()
        await bench.in_step()
        assert (bench.engine.running, bench.engine.waiting) == (1, 1)
        bench.engine.submit([tools.request("a", [1])])
        with pytest.raises(QueueFull):
            bench.engine.submit([tools.request("b", [1])])
        bench.release()
        await bench.engine.until_idle()

    tools.run_engine(test, num_pages=10, page_size=4, max_num_seqs=8, max_queued_requests=2)


def test_the_queue_is_bounded_by_tokens_when_asked(tools: Any) -> None:
    async def test(bench: Any) -> None:
        bench.hold()
        bench.engine.submit([tools.request("running", [1] * 100, max_tokens=50)])
        await bench.in_step()
        bench.engine.submit([tools.request("a", [1] * 30, n=4)])
        with pytest.raises(QueueFull, match="30 tokens are waiting and the limit is 50"):
            bench.engine.submit([tools.request("b", [1] * 21)])
        bench.engine.submit([tools.request("c", [1] * 20)])
        bench.release()
        await bench.engine.until_idle()

    tools.run_engine(test, max_num_seqs=1, max_queued_tokens=50)


@pytest.mark.case(35)
def test_retry_after_is_the_measured_drain_rate(tools: Any) -> None:
    async def test(bench: Any) -> None:
        def advance(record: Any) -> None:
            bench.clock.now += 1.0

        bench.runner.before = advance  # a step takes a second
        await finish(tools, bench, *[tools.request(f"r{i}", [i], max_tokens=4) for i in range(3)])
        assert bench.engine.drain_rate == pytest.approx(0.25)
        bench.engine.submit([tools.request("running", [1], max_tokens=50)])
        bench.engine.submit([tools.request("w0", [1]), tools.request("w1", [1])])
        with pytest.raises(QueueFull) as full:
            bench.engine.submit([tools.request("w2", [1])])
        assert full.value.retry_after_seconds == 4

    tools.run_engine(test, max_num_seqs=1, max_queued_requests=2)


def test_an_id_in_use_is_refused_and_free_again_afterwards(tools: Any) -> None:
    async def test(bench: Any) -> None:
        request = tools.request("same", [1])
        (stream,) = bench.engine.submit([request])
        with pytest.raises(DuplicateRequest):
            bench.engine.submit([request])
        with pytest.raises(DuplicateRequest):
            bench.engine.submit([tools.request("twice", [1]), tools.request("twice", [2])])
        await tools.read(stream)
        assert (await finish(tools, bench, request))[0].finish_reason == "length"
        with pytest.raises(ValueError, match="0 prompt tokens"):
            bench.engine.submit([tools.request("empty", [])])

    tools.run_engine(test)


def test_a_row_that_is_not_finite_fails_its_request_alone(tools: Any) -> None:
    async def test(bench: Any) -> None:
        bench.runner.broken_token = 60
        requests = [tools.request("bad", [1, 60, 2], n=3), tools.request("good", [2, 3])]
        streams = bench.engine.submit(requests)
        bad, good = await asyncio.gather(*[tools.read(stream) for stream in streams])
        assert {a.finish_reason for a in bad.values()} == {"error"}
        assert all(isinstance(a.error, NonFiniteLogits) for a in bad.values())
        assert len(bad) == 3
        assert good[0].text == tools.expected(requests[1]).text
        await bench.engine.until_idle()
        bench.assert_baseline()
        bench.runner.broken_token = None
        assert (await finish(tools, bench, tools.request("again", [1, 60, 2])))[0].cached_tokens == 0

    tools.run_engine(test)


def test_an_error_in_handling_one_sequence_fails_its_request_alone(tools: Any, caplog: Any) -> None:
    async def test(bench: Any) -> None:
        requests = [tools.request("bad", [1, 2], max_tokens=50), tools.request("good", [3, 4], max_tokens=50)]
        bad, good = bench.engine.submit(requests)

        def refuse(*args: Any) -> None:
            raise RuntimeError("a fault on purpose")

        bad.put_token = refuse
        answers = await asyncio.gather(tools.read(bad), tools.read(good))
        assert answers[0][0].finish_reason == "error"
        assert isinstance(answers[0][0].error, SequenceFailed)
        assert answers[1][0].text == tools.expected(requests[1]).text
        await bench.engine.until_idle()
        bench.assert_baseline()

    tools.run_engine(test)
    assert "a fault on purpose" in caplog.text


def test_a_request_that_cannot_be_admitted_gets_an_error(tools: Any) -> None:
    async def test(bench: Any) -> None:
        bad, good = await finish(
            tools, bench, tools.request("bad", [1], logit_bias=((99, 1.0),)), tools.request("good", [1])
        )
        assert isinstance(bad.error, SequenceFailed)
        assert good.finish_reason == "length"

    tools.run_engine(test)


def test_a_choice_that_cannot_be_admitted_takes_its_own_request_with_it_only(tools: Any, monkeypatch: Any) -> None:
    async def test(bench: Any) -> None:
        choices = tools.request("choices", [1, 2, 3], n=3, temperature=1.0, max_tokens=30)
        state = bench.engine._state.sampling
        opened = []

        def open_slot(slot: int, params: Any, *tokens: Any) -> None:
            opened.append(params.seed)
            if params.seed == derive_seed(choices.params.seed, 2):
                raise RuntimeError("a fault on purpose")
            original(slot, params, *tokens)

        original = state.open
        monkeypatch.setattr(state, "open", open_slot)
        neighbour = tools.request("neighbour", [9], seed=8, max_tokens=40)
        short = [tools.request(f"s{i}", [i], max_tokens=2) for i in range(2)]
        streams = bench.engine.submit([neighbour, *short, choices])
        answers = [await tools.read(stream) for stream in streams]
        assert answers[0][0].text == tools.expected(neighbour).text
        assert [type(answer.error) for answer in answers[3].values()] == [SequenceFailed] * 3
        assert opened[-2:] == [derive_seed(choices.params.seed, i) for i in (1, 2)]  # in one plan
        assert all(record.error is None for record in bench.records)
        await bench.engine.until_idle()
        bench.assert_baseline()

    tools.run_engine(test, max_num_seqs=4)


def test_a_step_that_raises_fails_those_in_it_and_nobody_else(tools: Any) -> None:
    async def test(bench: Any) -> None:
        def fail_once(batch: Any) -> None:
            bench.runner.before = lambda batch: None
            raise RuntimeError("a step that fails on purpose")

        bench.runner.before = fail_once
        requests = [tools.request(f"r{i}", [7, 8, 9, i], n=2, max_tokens=20) for i in range(4)]
        streams = bench.engine.submit(requests)
        answers = await asyncio.gather(*[tools.read(stream) for stream in streams])
        for answer in answers[:2]:  # two slots: choices 0 and 1 of the first request at least
            assert set(answer) == {0, 1}
        failed = [a for a in answers if a[0].finish_reason == "error"]
        assert 0 < len(failed) < 4
        assert all(isinstance(choice.error, StepFailed) for a in failed for choice in a.values())
        for request, answer in zip(requests, answers, strict=True):
            if answer[0].finish_reason != "error":
                assert answer[1].text == tools.expected(request, 1).text
        assert bench.engine.healthy
        await bench.engine.until_idle()
        bench.assert_baseline()
        assert "on purpose" in bench.records[0].error
        again = tools.request("again", [7, 8, 9, 0], max_tokens=20)
        assert (await finish(tools, bench, again))[0].text == tools.expected(again).text

    tools.run_engine(test, max_num_seqs=2)


def test_steps_that_fail_now_and_then_do_not(tools: Any) -> None:
    async def test(bench: Any) -> None:
        def fail(batch: Any) -> None:
            if 13 in batch.token_ids:
                raise RuntimeError("a step that fails on purpose")

        bench.runner.before = fail
        for i in range(5):
            bad, good = await finish(tools, bench, tools.request(f"b{i}", [13]), tools.request(f"g{i}", [14, 13 - 1]))
            assert isinstance(bad.error, StepFailed)
            good = (await finish(tools, bench, tools.request(f"h{i}", [2], max_tokens=1)))[0]
            assert good.finish_reason == "length"
        assert bench.engine.healthy

    tools.run_engine(test)


def test_nothing_that_was_cached_before_a_failed_step_is_trusted_after_it(tools: Any) -> None:
    async def test(bench: Any) -> None:
        prompt = list(range(20))
        await finish(tools, bench, tools.request("warm", prompt))

        def fail(batch: Any) -> None:
            bench.runner.before = lambda batch: None
            raise RuntimeError("a step that fails on purpose")

        bench.runner.before = fail
        await finish(tools, bench, tools.request("bad", [1]))
        (answer,) = await finish(tools, bench, tools.request("again", prompt))
        assert answer.cached_tokens == 0

    tools.run_engine(test)


def test_a_cancelled_request_ends_with_the_failed_step_it_was_not_part_of(tools: Any) -> None:
    async def test(bench: Any) -> None:
        hold = bench.runner.before

        def fail_second(batch: Any) -> None:
            if bench.runner.steps == 1:
                hold(batch)
                raise RuntimeError("a step that fails on purpose")

        bench.runner.before = fail_second
        bench.hold()
        # Two choices decode in the second step, and leave no row for the other's prompt.
        first, second = bench.engine.submit([tools.request("a", [1], n=2), tools.request("b", [2] * 9)])
        await bench.in_step()
        assert bench.engine.running == 3
        bench.engine.cancel("b")
        bench.release()
        assert isinstance((await tools.read(first))[0].error, StepFailed)
        assert (await tools.read(second))[0].finish_reason == "cancelled"
        await bench.engine.until_idle()
        assert [len(record.sequences) for record in bench.records] == [2, 2]
        bench.assert_baseline()

    tools.run_engine(test, max_num_batched_tokens=2)


@pytest.mark.case(38)
def test_steps_that_keep_failing_turn_the_engine_unhealthy(tools: Any) -> None:
    async def test(bench: Any) -> None:
        def fail(batch: Any) -> None:
            raise RuntimeError("the device is gone")

        bench.runner.before = fail
        streams = bench.engine.submit([tools.request(f"r{i}", [i]) for i in range(8)])
        answers = await asyncio.gather(*[tools.read(stream) for stream in streams])
        kinds = [type(answer[0].error) for answer in answers]
        assert kinds == [StepFailed] * 3 + [Interrupted] * 5
        assert not bench.engine.healthy
        assert "the device is gone" in bench.engine.unhealthy_reason
        with pytest.raises(NotAccepting, match="the device is gone"):
            bench.engine.submit([tools.request("late", [1])])

    tools.run_engine(test, max_num_seqs=1)


def test_a_store_that_is_not_sound_after_a_failed_step_turns_the_engine_unhealthy(tools: Any) -> None:
    async def test(bench: Any) -> None:
        def fail(batch: Any) -> None:
            bench.kv.pools[0].used += 1
            raise RuntimeError("a step that fails on purpose")

        bench.runner.before = fail
        (answer,) = await finish(tools, bench, tools.request("r", [1]))
        assert isinstance(answer.error, StepFailed)
        assert not bench.engine.healthy
        assert "not sound" in bench.engine.unhealthy_reason

    tools.run_engine(test)


def test_readers_are_told_even_when_nothing_can_be_given_back(tools: Any, monkeypatch: Any) -> None:
    async def test(bench: Any) -> None:
        def fault(*args: Any) -> None:
            raise RuntimeError("a fault on purpose")

        monkeypatch.setattr(bench.kv, "close", fault)
        answers = await finish(tools, bench, *[tools.request(f"r{i}", [i], n=2) for i in range(3)])
        assert all(answer.finish_reason == "error" for answer in answers)
        assert not bench.engine.healthy

    tools.run_engine(test, max_num_seqs=2)


def test_a_fault_in_the_scheduler_itself_leaves_nobody_waiting(tools: Any, monkeypatch: Any) -> None:
    async def test(bench: Any) -> None:
        def fault(*args: Any) -> None:
            raise RuntimeError("a fault on purpose")

        monkeypatch.setattr("scheduler.engine.plan", fault)
        (answer,) = await finish(tools, bench, tools.request("r", [1]))
        assert isinstance(answer.error, Interrupted)
        assert not bench.engine.healthy

    tools.run_engine(test)


def test_tokens_are_read_while_the_next_step_computes(tools: Any) -> None:
    async def test(bench: Any) -> None:
        (stream,) = bench.engine.submit([tools.request("r", [1, 2], max_tokens=4)])
        steps = []
        entered = bench.runner.before

        def count(batch: Any) -> None:
            steps.append(1)
            if len(steps) == 2:
                bench.hold()
            entered(batch)

        bench.runner.before = count
        update = await anext(stream)
        assert len(update.tokens) == 1
        await bench.in_step()
        assert bench.engine.busy
        bench.release()

    tools.run_engine(test)


def test_a_slow_reader_gets_everything_in_one_update_for_each_choice(tools: Any) -> None:
    async def test(bench: Any) -> None:
        request = tools.request("r", [1, 2], n=3, max_tokens=40, temperature=1.0, logprobs=1)
        (stream,) = bench.engine.submit([request])
        await bench.engine.until_idle()
        updates = [update async for update in stream]
        assert [update.index for update in updates] == [0, 1, 2]
        assert [len(update.tokens) for update in updates] == [40, 40, 40]
        assert [len(update.logprobs) for update in updates] == [40, 40, 40]

    tools.run_engine(test)


@pytest.mark.case(50)
def test_an_idle_engine_does_nothing_at_all(tools: Any) -> None:
    async def test(bench: Any) -> None:
        for _ in range(2):  # before the first request, and after one
            await asyncio.sleep(0.05)
            reads = bench.clock.reads
            await asyncio.sleep(0.3)
            assert bench.clock.reads == reads
            await finish(tools, bench, tools.request("r", [1]))

    tools.run_engine(test)


@pytest.mark.case(50)
def test_a_stalled_reader_does_not_keep_the_engine_busy(tools: Any) -> None:
    async def test(bench: Any) -> None:
        stalled, _ = bench.engine.submit([tools.request("stalled", [1]), tools.request("gone", [2])])
        await anext(stalled)
        await bench.engine.until_idle()
        reads = bench.clock.reads
        await asyncio.sleep(0.2)
        assert bench.clock.reads == reads

    tools.run_engine(test)


def test_draining_lets_running_and_queued_requests_finish(tools: Any) -> None:
    async def test(bench: Any) -> None:
        streams = bench.engine.submit([tools.request(f"r{i}", [i], max_tokens=20) for i in range(6)])
        readers = [asyncio.create_task(tools.read(stream)) for stream in streams]
        drained = asyncio.create_task(bench.engine.drain(10))
        await asyncio.sleep(0)
        assert not bench.engine.accepting
        with pytest.raises(NotAccepting, match="shutting down"):
            bench.engine.submit([tools.request("late", [1])])
        assert await drained
        assert [(await reader)[0].finish_reason for reader in readers] == ["length"] * 6

    tools.run_engine(test, max_num_seqs=2)


def test_what_has_not_finished_when_the_grace_is_over_gets_an_error(tools: Any) -> None:
    async def test(bench: Any) -> None:
        bench.hold()
        streams = bench.engine.submit([tools.request(f"r{i}", [i], max_tokens=20) for i in range(4)])
        await bench.in_step()
        drained = asyncio.create_task(bench.engine.drain(0.05))
        await asyncio.sleep(0.2)
        bench.release()
        assert not await drained
        for stream in streams:
            answer = (await tools.read(stream))[0]
            assert isinstance(answer.error, Interrupted)
        bench.assert_baseline()

    tools.run_engine(test, max_num_seqs=2)


def test_stopping_does_not_wait_for_a_wedged_step(tools: Any) -> None:
    async def test(bench: Any) -> None:
        bench.hold()
        (stream,) = bench.engine.submit([tools.request("r", [1])])
        await bench.in_step()
        await bench.engine.stop(grace_seconds=0.05)
        assert isinstance((await tools.read(stream))[0].error, Interrupted)

    tools.run_engine(test)


def test_progress_is_stamped_so_that_a_wedged_step_can_be_noticed(tools: Any) -> None:
    async def test(bench: Any) -> None:
        bench.clock.now = 500.0
        bench.hold()
        (stream,) = bench.engine.submit([tools.request("r", [1])])
        await bench.in_step()
        bench.clock.now = 600.0
        assert (bench.engine.busy, bench.engine.last_progress) == (True, 500.0)
        bench.release()
        await tools.read(stream)
        assert bench.engine.last_progress == 600.0

    tools.run_engine(test)


def test_a_fault_in_a_listener_disturbs_nothing(tools: Any, caplog: Any) -> None:
    async def test(bench: Any) -> None:
        def fault(*args: Any) -> None:
            raise RuntimeError("a listener's fault")

        bench.engine._on_step = fault
        request = tools.request("r", [1, 2])
        assert (await finish(tools, bench, request))[0].text == tools.expected(request).text

    tools.run_engine(test)
    assert "a listener's fault" in caplog.text
