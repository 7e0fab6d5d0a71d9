"""From a StepPlan to the arrays the model runs on. Owned by the engine's task; knows nothing of why the rows are there.

Python work is per sequence, never per token. The arrays are fresh copies: the step may read them in its thread while
the state moves on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

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
    sampled_rows: npt.NDArray[np.intp]  # [len(sampled)]
    scored: list[tuple[Sequence, int, int]]
    parents: list[Sequence]
    masks: Masks | None = None
    moves: Moves | None = None  # between the tiers of the KV memory, before the batch runs
    accepted: dict[Sequence, int] = field(default_factory=dict)  # of each draft, once the step has been applied


def build(plan: StepPlan, state: State) -> Step:
    """Arrange the plan's rows, and behind them those of the drafts. Needs at least one row."""
    kv = state.kv
    drafts = plan.drafts
    drafted = {draft.sequence: draft for draft in drafts}
    counts = plan.rows.copy()
    owners = plan.sequences.copy()
    paths: list[I32 | None] = [None] * len(counts)
    pages = []
    for index, sequence in enumerate(owners):
        assert sequence.kv is not None
        pages.append(sequence.kv.slot)
        if sequence in drafted:
            paths[index] = drafted[sequence].draft.paths[0]
            counts[index] += len(drafted[sequence].draft.paths[0])
    for draft in drafts:
        for fork, branch in zip(draft.forks, draft.draft.paths[1:], strict=True):
            owners.append(draft.sequence)
            pages.append(fork.slot)
            paths.append(branch)
            counts.append(1 + len(branch))
    starts = np.array([sequence.computed for sequence in owners], np.int32)
    rows = np.array(counts, np.int32)
    lengths = starts + rows
    query_starts = np.zeros(len(counts) + 1, np.int32)
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
    behind: dict[int, I32] = {}  # logit row, the drafted tokens before it
    constrained: list[tuple[int, Sequence, I32]] = []
    first = 0
    for sequence, length, path in zip(owners, counts, paths, strict=True):
        start = sequence.computed
        after = first + length
        if path is not None:
            token_ids[first] = sequence.buffer[start]
            token_ids[first + 1 : after] = path
            row = len(logit_rows)
            ours = drafted[sequence]
            if not ours.rows:
                sampled.append(sequence)
                sampled_rows.append(row)
            ours.rows.append(row)
            behind.update({row + count: path[:count] for count in range(1, length)})
            if sequence.request.constraint is not None:
                constrained.append((row, sequence, path))
            logit_rows.extend(range(first, after))
            slots.extend([sequence.slot] * length)
            first = after
            continue
        if length == 1:
            token_ids[first] = sequence.buffer[start]
        else:
            token_ids[first:after] = sequence.buffer[start : start + length]
        if sequence.scoring:
            # The row at position p is asked about token p + 1.
            begin, end = max(start + 1, sequence.scored), min(start + length + 1, sequence.prompt_length)
            if begin < end:
                targets.append((len(logit_rows), sequence.buffer[begin:end]))
                scored.append((sequence, len(logit_rows), end - begin))
                logit_rows.extend(range(first + begin - 1 - start, first + end - 1 - start))
                slots.extend([sequence.slot] * (end - begin))
        if start + length == sequence.known:  # the last known token: what follows it is sampled
            if sequence.forks:
                parents.append(sequence)
            for choice in (sequence, *sequence.forks):
                if choice is sequence or choice.status is Status.FORKING:
                    if choice.request.constraint is not None:
                        constrained.append((len(logit_rows), choice, token_ids[:0]))
                    sampled.append(choice)
                    sampled_rows.append(len(logit_rows))
                    logit_rows.append(after - 1)
                    slots.append(choice.slot)
        first = after

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
            behind,
        ),
    )
    return Step(plan, batch, sampled, np.array(sampled_rows, np.intp), scored, parents, masks, kv.drain_moves())
