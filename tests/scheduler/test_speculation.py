"""What drafting changes: how many steps a text takes, and nothing in it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scheduler.acceptance import Acceptance
from scheduler.plan import plan
from scheduler.proposers.base import Ask, Draft, Proposer
from scheduler.proposers.ngram import NgramProposer, SuffixIndex
from scheduler.recording import replay
from scheduler.speculation import PROBE_AFTER, Speculation
from scheduler.step_times import StepTimes, measure


def answered(tools: Any, bench: Any, *requests: Any) -> int:
    """Run the requests and compare them with their solo runs; how many steps that took."""
    bench.submit(*requests)
    steps: int = bench.run()
    for request in requests:
        for index, answer in bench.answers(request.id).items():
            assert answer.text == tools.expected(request, index).text
    bench.assert_baseline()
    return steps


def test_a_draft_that_is_right_gives_all_its_tokens_and_one_more_in_a_step(tools: Any) -> None:
    oracle = tools.Oracle(random.Random(0), right=1.0)
    oracle.rng.randint = lambda low, high: high
    oracle.rng.random = lambda: 0.0
    bench = tools.Bench(proposer=oracle)
    assert answered(tools, bench, tools.request("r", range(9), max_tokens=1 + 4 * 6)) == 1 + 4
    life = bench.journal.life("r")
    assert (life.drafted_tokens, life.accepted_tokens) == (0, 0)  # the engine's to note, from what the sequence counted
    assert [seen.accepted for seen in oracle.seen] == [5, 5, 5, 5]


@pytest.mark.parametrize("branches", [1, 3])
def test_a_draft_that_is_wrong_gives_the_token_that_a_step_without_would(tools: Any, branches: int) -> None:
    oracle = tools.Oracle(random.Random(0), right=0.0)
    bench = tools.Bench(proposer=oracle, branches=branches)
    bench.speculation._adaptive = False
    steps = answered(tools, bench, tools.request("r", range(9), max_tokens=20, temperature=1.0))
    assert 10 <= steps <= 20
    assert oracle.seen


def test_the_pages_of_the_best_branch_are_the_sequences_own_from_then_on(tools: Any) -> None:
    class SecondIsRight(tools.Oracle):  # type: ignore[misc]
        def _propose(self, ask: Ask) -> Draft:
            right = super()._propose(Ask(ask.sequence, ask.tokens)).paths
            return Draft([np.array([(int(path[0]) + 1) % tools.VOCAB]) for path in right] + right)

    oracle = SecondIsRight(random.Random(1), right=1.0)
    bench = tools.Bench(proposer=oracle, branches=2, page_size=4)
    steps = answered(tools, bench, *(tools.request(f"r{i}", [i, *range(7)], max_tokens=30) for i in range(3)))
    assert steps < 30
    assert max(seen.accepted for seen in oracle.seen) == 5


def test_max_tokens_stop_tokens_and_grammars_end_a_text_in_the_middle_of_a_draft(tools: Any) -> None:
    oracle = tools.Oracle(random.Random(3), right=1.0)
    bench = tools.Bench(proposer=oracle, num_pages=1000)
    requests = [tools.request(f"max{i}", [i, 2], max_tokens=i) for i in range(1, 12)]
    requests += [tools.request(f"eos{i}", [i, 5], max_tokens=200, ignore_eos=False) for i in range(8)]
    requests += [
        tools.request(f"rule{i} {tells}", [i, 9], max_tokens=40, constraint=tools.Rule(i, tells))
        for i in range(9)
        for tells in ("at once", "when asked")
    ]
    answered(tools, bench, *requests)
    assert {"stop", "length"} == {bench.answers(request.id)[0].finish_reason for request in requests}


def test_penalties_biases_and_bad_words_behind_drafts_are_those_of_the_undrafted_run(tools: Any) -> None:
    def batch(state: Any, drafts: dict[int, Any], rows: int) -> Any:
        slots = np.zeros(rows, np.int32)
        return state.batch(slots, np.arange(rows, dtype=np.int32), np.full(rows, -1, np.int32), drafts=drafts)

    from models.sampling import SamplingParams
    from models.sampling_state import SamplingState

    params = SamplingParams(
        seed=1, presence_penalty=0.5, repetition_penalty=1.1, min_tokens=3, stop_token_ids=(9,), bad_words=((4, 5, 6),)
    )
    prompt, outputs = np.array([1, 2], np.int32), np.array([4], np.int32)
    draft = np.array([5, 1, 4, 5], np.int32)
    drafted = SamplingState(1, 16, (7,))
    drafted.open(0, params, prompt, outputs)
    together = batch(drafted, {row: draft[:row] for row in range(1, 5)}, 5)
    for row in range(5):
        plain = SamplingState(1, 16, (7,))
        plain.open(0, params, prompt, np.concatenate([outputs, draft[:row]]))
        alone = batch(plain, {}, 1)
        assert (together.counts[together.count_row[row]] == alone.counts[alone.count_row[0]]).all()
        biases = [] if together.bias_row is None else np.flatnonzero(together.bias_row == row)
        ours = [(int(together.bias_token[i]), float(together.bias_value[i])) for i in biases]
        rows = [] if alone.bias_row is None else range(len(alone.bias_row))
        assert ours == [(int(alone.bias_token[i]), float(alone.bias_value[i])) for i in rows]
    assert (drafted.batch(np.zeros(1, np.int32), np.zeros(1, np.int32), np.full(1, -1, np.int32)).count_row == 0).all()


def test_drafting_preempts_nobody_and_takes_no_pages_that_somebody_waits_for(tools: Any) -> None:
    def preemptions(proposer: Proposer | None) -> int:
        bench = tools.Bench(page_size=1, num_pages=70, proposer=proposer)
        answered(tools, bench, *(tools.request(f"r{i}", [i, 3], max_tokens=28) for i in range(4)))
        return sum(len(step.preempted) for step in bench.plans)

    assert preemptions(tools.Oracle(random.Random(2), right=0.5)) <= preemptions(None)


def test_drafts_take_only_what_prompts_leave_of_the_budget(tools: Any) -> None:
    oracle = tools.Oracle(random.Random(2), right=1.0)
    bench = tools.Bench(proposer=oracle, num_pages=1000, max_num_batched_tokens=16)
    answered(tools, bench, *(tools.request(f"r{i}", range(i, i + 60), max_tokens=20) for i in range(4)))
    assert oracle.seen


def test_beside_prompts_nothing_is_drafted_unless_it_always_is(tools: Any) -> None:
    for adaptive in (True, False):
        oracle = tools.Oracle(random.Random(2), right=1.0)
        bench = tools.Bench(proposer=oracle, num_pages=1000, max_num_batched_tokens=64)
        bench.speculation = Speculation(oracle, lambda rows: 1 + rows / 100, tokens=4, adaptive=adaptive)
        bench.submit(tools.request("decodes", [1, 2], max_tokens=90))
        for _ in range(2):
            bench.step()
        assert bench.plans[-1].drafts
        bench.submit(tools.request("prompt", range(3, 50), max_tokens=9))
        assert bool(bench.step().drafts) == (not adaptive)
        bench.step()
        assert bench.plans[-1].drafts


def test_a_text_that_cannot_be_guessed_is_soon_left_alone_but_tried_again(tools: Any) -> None:
    oracle = tools.Oracle(random.Random(4), right=0.0)
    bench = tools.Bench(proposer=oracle, num_pages=1000)
    bench.speculation._seconds = lambda rows: 1 + rows / 6
    answered(tools, bench, tools.request("r", range(5), max_tokens=400))
    assert 5 <= sum(len(seen.draft.paths[0]) for seen in oracle.seen) <= 400 // PROBE_AFTER + 12


def test_drafts_are_shorter_the_fuller_the_batch_the_dearer_the_rows_and_the_worse_the_guesses(tools: Any) -> None:
    def length(right: float, sequences: int, slope: float) -> int:
        bench = tools.Bench(proposer=tools.Oracle(random.Random(0)), num_pages=1000, max_num_seqs=16)
        speculation = Speculation(bench.speculation.proposer, lambda rows: 1 + rows * slope, tokens=16)
        bench.submit(*(tools.request(f"r{i}", [i, 8], max_tokens=60) for i in range(sequences)))
        bench.step()
        for sequence in bench.state.running:
            for _ in range(50):
                sequence.acceptance.note(int(8 * right), 8 if right < 1 else int(8 * right))
        asks = speculation.allot(bench.state, plan(bench.state, 1000))
        return max((ask.tokens for ask in asks), default=0)

    assert length(1.0, 1, 0.1) == 16 > length(0.5, 1, 0.1) > length(0.0, 1, 0.5) == 0
    assert length(0.5, 1, 0.1) > length(0.5, 16, 0.1)
    assert length(0.5, 1, 0.02) > length(0.5, 1, 0.3)


def test_acceptance_follows_what_was_seen_of_late() -> None:
    acceptance = Acceptance()
    assert acceptance.estimate(0.7) == pytest.approx(0.7)
    for _ in range(30):
        acceptance.note(0, 4)
    assert acceptance.estimate(0.7) < 0.15
    for _ in range(30):
        acceptance.note(4, 4)
    assert acceptance.estimate(0.7) > 0.9


def test_a_step_takes_what_was_measured_and_more_rows_never_take_less(tools: Any) -> None:
    times = StepTimes([1, 2, 4], [1.0, 0.9, 2.0])
    assert [times(rows) for rows in (1, 2, 3, 4, 6)] == [1.0, 1.0, 1.5, 2.0, 3.0]
    bench = tools.Bench(num_pages=64)
    measured = measure(bench.runner, 64, 4)
    assert measured(64) >= measured(1) > 0


def test_a_machine_that_is_busy_for_some_steps_spoils_no_row_count() -> None:
    class Busy:
        now, steps = 0.0, 0

        def run(self, batch: Any) -> None:
            self.steps += 1
            self.now += 1 + len(batch.logit_rows) / 10 + (50 if 2 <= self.steps <= 9 else 0)

    runner: Any = Busy()
    measured = measure(runner, 64, 16, clock=lambda: runner.now)
    assert [measured(rows) for rows in (1, 2, 8, 32)] == pytest.approx([1.1, 1.2, 1.8, 4.2])


@pytest.mark.parametrize("seed", range(5))
def test_the_suffix_index_finds_the_longest_run_and_the_latest_place(seed: int) -> None:
    rng = random.Random(seed)
    tokens = [rng.randrange(4) for _ in range(400)]
    index = SuffixIndex(2, 4)
    done = 0
    while done < len(tokens):
        step = rng.choice([1, 1, 1, 2, 7, 50])
        index.extend(np.array(tokens[done : done + step], np.int32))
        done = min(len(tokens), done + step)
        expected = None
        for length in (4, 3, 2):
            ends = [e for e in range(length, done) if tokens[e - length : e] == tokens[done - length : done]]
            if done > length and ends:
                expected = ends[-1]
                break
        assert index.find(tokens[max(0, done - 4) : done]) == expected
    assert index.follow(398, 5) == [tokens[398], tokens[399], tokens[398], tokens[399], tokens[398]]


def test_ngram_drafts_what_followed_before_and_learns_from_neighbours_of_the_same_namespace(tools: Any) -> None:
    proposer = NgramProposer(2, 3, share_outputs=True)
    bench = tools.Bench(proposer=proposer)
    first, again, other = (
        tools.request(name, [5, 6], max_tokens=30, namespace=space)
        for name, space in (("first", "a"), ("again", "a"), ("other", "b"))
    )
    steps = [answered(tools, bench, request) for request in (first, other, again)]
    assert steps[2] < steps[0] == steps[1]
    bench.speculation.reset()
    assert answered(tools, bench, tools.request("reset", [5, 6], max_tokens=30, namespace="a")) == steps[0]


def test_a_proposer_that_fails_costs_its_drafts_and_nothing_else(tools: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(tools.Oracle):  # type: ignore[misc]
        runs_model = True

        def propose(self, asks: list[Ask]) -> list[Draft]:
            raise RuntimeError("no idea")

    async def test(bench: Any) -> None:
        request = tools.request("r", range(9), max_tokens=12)
        [stream] = bench.engine.submit([request])
        assert (await tools.read(stream))[0].text == tools.expected(request).text
        assert bench.engine.healthy

    tools.run_engine(test, proposer=Failing(random.Random(0)))
    assert "drafting by oracle failed" in caplog.text


@pytest.mark.parametrize("runs_model", [False, True])
def test_steps_lives_and_updates_say_what_was_drafted_and_accepted(
    tools: Any, runs_model: bool, tmp_path: Path
) -> None:
    oracle = tools.Oracle(random.Random(5))
    oracle.runs_model = runs_model

    async def test(bench: Any) -> None:
        requests = [tools.request(f"r{i}", [i, 4, 4], max_tokens=40, n=1 + i % 2) for i in range(6)]
        streams = bench.engine.submit(requests)
        ends = []
        for request, stream in zip(requests, streams, strict=True):
            async for update in stream:
                if update.finish_reason is not None:
                    ends.append((update.accepted_tokens, update.rejected_tokens))
            life = bench.engine.journal.life(request.id)
            assert life.accepted_tokens == sum(note.accepted for note in life.drafts) > 0
        await bench.engine.until_idle()
        assert sum(record.accepted_tokens for record in bench.records) == sum(accepted for accepted, _ in ends) > 0
        assert sum(record.drafted_tokens for record in bench.records) == sum(map(sum, ends))
        rows = [
            (one, named)
            for record in bench.records
            for one, named in zip(record.drafts, record.draft_rows, strict=True)
        ]
        assert all(one[1] <= named[2] and named[0] in {request.id for request in requests} for one, named in rows)
        assert bench.kv.stats().used == 0

    tools.run_engine(test, proposer=oracle, branches=2, journal=tmp_path / "journal", num_pages=60)
    decided = list(replay(tmp_path / "journal"))
    assert len(decided) > 10
    for then, now in decided:
        assert then == now


def test_without_adaptation_every_draft_is_as_long_as_it_can_be(tools: Any) -> None:
    bench = tools.Bench(proposer=tools.Oracle(random.Random(0)))
    bench.speculation = Speculation(bench.speculation.proposer, lambda rows: float(rows), tokens=7, adaptive=False)
    asked: list[int] = []
    propose = bench.speculation.proposer.propose
    bench.speculation.proposer.propose = lambda asks: asked.extend(ask.tokens for ask in asks) or propose(asks)
    answered(tools, bench, tools.request("r", range(5), max_tokens=60))
    assert max(asked) == 7
