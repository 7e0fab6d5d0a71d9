"""The arrays of a step, row by row."""

from __future__ import annotations

from typing import Any

from scheduler.batch import build
from scheduler.plan import plan


def build_next(bench: Any) -> Any:
    return build(plan(bench.state, bench.limits.max_num_batched_tokens), bench.state)


def test_rows_of_a_sequence_are_adjacent_and_only_the_last_known_token_has_logits(tools: Any) -> None:
    bench = tools.Bench(page_size=4, max_num_batched_tokens=11)
    bench.submit(tools.request("a", [10, 11, 12]), tools.request("b", range(20, 30)))
    step = build_next(bench)
    batch = step.batch
    assert batch.token_ids.tolist() == [10, 11, 12, *range(20, 28)]
    assert batch.positions.tolist() == [0, 1, 2, *range(8)]
    assert batch.query_starts.tolist() == [0, 3, 11]
    assert batch.lengths.tolist() == [3, 8]
    assert batch.logit_rows.tolist() == [2]
    assert batch.sampling.position.tolist() == [3]
    assert [sequence.request.id for sequence in step.sampled] == ["a"]
    (table,) = batch.page_tables
    assert table.shape == (2, 2)
    assert table.flags.c_contiguous
    assert len({int(table[0, 0]), *table[1].tolist()}) == 3


def test_the_last_prompt_row_is_read_once_for_each_choice(tools: Any) -> None:
    bench = tools.Bench(max_num_seqs=3)
    bench.submit(tools.request("r", [5, 6, 7], n=4, seed=9))
    step = build_next(bench)
    assert step.batch.logit_rows.tolist() == [2, 2, 2]
    assert [sequence.index for sequence in step.sampled] == [0, 1, 2]
    assert step.batch.sampling.seed[0] == 9
    assert len(set(step.batch.sampling.seed.tolist())) == 3


def test_a_scored_prompt_asks_every_row_about_the_next_token(tools: Any) -> None:
    bench = tools.Bench(max_num_batched_tokens=4)
    bench.submit(tools.request("r", [5, 6, 7, 8, 9, 10], prompt_logprobs=1))
    step = build_next(bench)
    assert step.batch.logit_rows.tolist() == [0, 1, 2, 3]
    assert step.batch.sampling.target.tolist() == [6, 7, 8, 9]
    assert (step.scored[0][1:], step.sampled) == ((0, 4), [])
    bench.runner.run(step.batch)
    sequence = step.plan.sequences[0]
    sequence.computed, sequence.scored = 4, 5
    step = build_next(bench)
    assert step.batch.sampling.target.tolist() == [10, -1]
    assert (step.batch.logit_rows.tolist(), step.sampled_rows.tolist()) == ([0, 1], [1])


def test_the_arrays_are_the_steps_own(tools: Any) -> None:
    bench = tools.Bench()
    bench.submit(tools.request("r", [5, 6, 7]))
    batch = build_next(bench).batch
    before = [batch.token_ids.copy(), batch.page_tables[0].copy()]
    bench.requests.end("r", None, "cancelled")
    bench.submit(tools.request("other", [50, 51, 52, 53, 54]))
    build_next(bench)
    assert (batch.token_ids == before[0]).all()
    assert (batch.page_tables[0] == before[1]).all()
