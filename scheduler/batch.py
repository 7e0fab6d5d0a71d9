"""From a StepPlan to the arrays the model runs on. Owned by the engine's task; knows nothing of why the rows are there.

Python work is per sequence, never per token. The arrays are fresh copies: the step may read them in its thread while
the state moves on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstore.tier import Moves
from models.base import Batch
from scheduler.constraint import Masks
from scheduler.plan import StepPlan
from scheduler.request import I32, Sequence, Status
from scheduler.state import State


@dataclass(frozen=True, slots=True)
class Step:
    """A batch, and who is to read which of its logit rows.

    `sampled[i]` reads logit row `sampled_rows[i]`. `scored` has (sequence, first logit row, rows): the logprobs of the
    prompt tokens `sequence.scored` .. of it. `parents` have computed their whole prompt with this step and fork after
    it. `masks` are to be filled before the batch is run; None when nobody is constrained.
    """

    plan: StepPlan
    batch: Batch
    sampled: list[Sequence]
    sampled_rows: I32  # [len(sampled)]
    scored: list[tuple[Sequence, int, int]]
    parents: list[Sequence]
    masks: Masks | None = None
    moves: Moves | None = None  # between the tiers of the KV memory, before the batch runs


def build(plan: StepPlan, state: State) -> Step:
    """Arrange the plan's rows. Needs at least one row."""
    kv = state.kv
    count = len(plan.sequences)
    starts = np.array([sequence.computed for sequence in plan.sequences], np.int32)
    rows = np.array(plan.rows, np.int32)
    lengths = starts + rows
    query_starts = np.zeros(count + 1, np.int32)
    np.cumsum(rows, out=query_starts[1:])
    total = int(query_starts[-1])
    positions = np.arange(total, dtype=np.int32)
    positions += np.repeat(starts - query_starts[:-1], rows)
    token_ids = np.empty(total, np.int32)

    sampled: list[Sequence] = []
    scored: list[tuple[Sequence, int, int]] = []
    parents: list[Sequence] = []
    logit_rows: list[int] = []
    sampled_rows: list[int] = []
    slots: list[int] = []
    targets: list[tuple[int, I32]] = []  # first logit row, the prompt tokens it and the next ones are asked about
    pages: list[int] = []
    first = 0
    for sequence, length in zip(plan.sequences, plan.rows, strict=True):
        start = sequence.computed
        after = first + length
        if length == 1:
            token_ids[first] = sequence.buffer[start]
        else:
            token_ids[first:after] = sequence.buffer[start : start + length]
        assert sequence.kv is not None
        pages.append(sequence.kv.slot)
        if sequence.scoring:
            # The row at position p is asked about token p + 1.
            begin, end = max(start + 1, sequence.scored), min(start + length + 1, sequence.prompt_length)
            if begin < end:
                targets.append((len(logit_rows), sequence.buffer[begin:end]))
                scored.append((sequence, len(logit_rows), end - begin))
                logit_rows.extend(range(first + begin - 1 - start, first + end - 1 - start))
                slots.extend([sequence.slot] * (end - begin))
        if start + length == sequence.known:  # the last known token: what follows it is sampled
            sampled.append(sequence)
            sampled_rows.append(len(logit_rows))
            logit_rows.append(after - 1)
            slots.append(sequence.slot)
            if sequence.forks:
                parents.append(sequence)
                for child in sequence.forks:
                    if child.status is Status.FORKING:
                        sampled.append(child)
                        sampled_rows.append(len(logit_rows))
                        logit_rows.append(after - 1)
                        slots.append(child.slot)
        first = after

    constrained = {
        row: sequence
        for sequence, row in zip(sampled, sampled_rows, strict=True)
        if sequence.request.constraint is not None
    }
    masks = Masks(constrained, len(logit_rows), state.sampling.vocab_size) if constrained else None
    logits = np.array(logit_rows, np.int32)
    target = np.full(len(logits), -1, np.int32)
    for row, tokens in targets:
        target[row : row + len(tokens)] = tokens
    width = -(-int(lengths.max()) // kv.page_size)
    batch = Batch(
        token_ids=token_ids,
        positions=positions,
        query_starts=query_starts,
        lengths=lengths,
        page_tables=kv.tables.gather(np.array(pages, np.intp), width),
        copies=kv.drain_copies(),
        logit_rows=logits,
        sampling=state.sampling.batch(
            np.array(slots, np.int32),
            positions[logits] + 1,
            target,
            None if masks is None else masks.allowed,
            None if masks is None else masks.rows,
        ),
    )
    return Step(plan, batch, sampled, np.array(sampled_rows, np.intp), scored, parents, masks, kv.drain_moves())
