"""Drafting with a model: another one of the same vocabulary, or the target's own weights in a lighter format.

All sequences are drafted for together, one level of tokens a step. The first step also catches up on the tokens that
the drafter has not seen; who has more of them than the step's budget leaves room for gets no draft this time. Tokens
are sampled as the target will sample them, with its penalties, biases, grammars, seeds and noise, so a drafter whose
logits are the target's would always be right.

With more branches the draft is a tree, after EAGLE-2 (Li et al. 2024): of all tokens that came second somewhere on the
main path, those that its confidence makes most probable are drafted further, beside it and in the same steps.

    level        0    1    2    3
    main path    d1   d2   d3   d4
    branch            e2   e3   e4       e2 was second to d2: likelier than what was second to d1 or d3

Owner: see `scheduler.proposers.base`. Knows nothing of where keys and values lie: `model_pages` does.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from models.base import Batch, Runner, StepOutput
from models.plain_batch import plain_batch
from models.sampling import SamplingBatch
from models.sampling_state import SamplingState
from scheduler.constraint import WORD_BITS
from scheduler.proposers.base import F32, Ask, Draft, Verified
from scheduler.proposers.model_pages import DraftPages, Place
from scheduler.proposers.model_paths import Path, draft_of, main_path
from scheduler.request import I32, Sequence
from scheduler.step_times import measure

if TYPE_CHECKING:
    from models.rejection import LogitsRunner


class ModelProposer:
    """See `scheduler.proposers.base.Proposer`.

    `sampling` is the target's; `budget` the most rows of a step. `keep_probabilities` is for the rejection rule.
    Runs a few steps to measure the runner, so nothing may be in its pages yet.
    """

    runs_model = True

    def __init__(
        self,
        name: str,
        runner: Runner,
        pages: DraftPages,
        sampling: SamplingState,
        *,
        budget: int,
        keep_probabilities: bool = False,
    ) -> None:
        self.name = name
        self._runner = runner
        self._pages = pages
        self._sampling = sampling
        self._budget = budget
        self._keep_probabilities = keep_probabilities
        self._times = measure(runner, pages.store.pools[0].total, pages.store.page_size)

    def seconds(self, sequences: int) -> float:
        return self._times(sequences)

    def observe(self, verified: list[Verified]) -> None:
        """Nothing to learn: what became of a draft shows when the sequence is drafted for again."""

    def forget(self, sequence: Sequence) -> None:
        self._pages.forget(sequence)

    def reset(self) -> None:
        self._pages.reset()

    def propose(self, asks: list[Ask]) -> list[Draft]:
        taken = zip(asks, self._pages.take(asks, self._budget), strict=True)
        placed = [(ask, place) for ask, place in taken if place is not None]
        placed.sort(key=lambda pair: not _complete(*pair))  # those with a draft first: their rows stay together
        mains = {ask.sequence: main_path(ask, place) for ask, place in placed if _complete(ask, place)}
        if placed:
            try:
                self._draft(placed, list(mains.values()))
            finally:
                for path in mains.values():
                    self._drop(path.branches)
            for ask, place in placed:
                main = mains.get(ask.sequence)
                # The last token drafted has not been read by anyone.
                drafted = np.empty(0, np.int32) if main is None else main.tokens[: max(0, main.length - 1)]
                self._pages.settle(ask, place, drafted)
        return [draft_of(mains[ask.sequence]) if ask.sequence in mains else Draft() for ask in asks]

    # -- levels -------------------------------------------------------------------------------------------------

    def _draft(self, placed: list[tuple[Ask, Place]], paths: list[Path]) -> None:
        """Run the first step, and one for each further level until every path is complete."""
        store, level = self._pages.store, 0
        width = -(-max(ask.sequence.known + ask.tokens for ask, _ in placed) // store.page_size)
        known, batch = self._first(placed, paths, width)
        while going := self._extend(paths, *self._run(batch)):
            if going != paths:
                known = np.array([path.ask.sequence.known for path in going], np.int32)
                slots = np.array([path.kv.slot for path in going], np.intp)
                tables = store.tables.gather(slots, width)
            else:
                tables = tuple(table[: len(going)] for table in batch.page_tables)
            paths, level = going, level + 1
            lengths = known + np.int32(level)
            batch = Batch(
                token_ids=np.array([path.tokens[level - 1] for path in paths], np.int32),
                positions=lengths - np.int32(1),
                query_starts=np.arange(len(paths) + 1, dtype=np.int32),
                lengths=lengths,
                page_tables=tables,
                copies=self._copies(),
                logit_rows=np.arange(len(paths), dtype=np.int32),
                sampling=self._sampling_of(paths, lengths),
            )

    def _first(self, placed: list[tuple[Ask, Place]], paths: list[Path], width: int) -> tuple[I32, Batch]:
        """The step that catches up and gives the first tokens, and what its paths know."""
        known = np.array([path.ask.sequence.known for path in paths], np.int32)
        counts = [place.rows for _, place in placed]
        pieces = [ask.sequence.tokens[place.start : place.start + place.rows] for ask, place in placed]
        tables = self._pages.store.tables.gather(np.array([place.kv.slot for _, place in placed], np.intp), width)
        batch = plain_batch(
            np.concatenate(pieces),
            tables[0],
            starts=[place.start for _, place in placed],
            counts=counts,
            logit_rows=np.cumsum(counts, dtype=np.int32)[: len(paths)] - np.int32(1),
        )
        return known, replace(
            batch, page_tables=tables, copies=self._copies(), sampling=self._sampling_of(paths, known)
        )

    def _copies(self) -> tuple[I32, ...]:
        """What is to be copied before the next step writes. Not drained yet: a step that fails must not lose them."""
        pending = [pool.pending() for pool in self._pages.store.pools]
        return tuple(np.array([(source, to) for to, source in p.items()], np.int32).reshape(-1, 2) for p in pending)

    def _run(self, batch: Batch) -> tuple[StepOutput, F32 | None]:
        """The sampled tokens, and where they are wanted the distributions they were sampled from."""
        probabilities = None
        if self._keep_probabilities and len(batch.logit_rows):
            from models.rejection import run_with_distributions

            output, probabilities = run_with_distributions(cast("LogitsRunner", self._runner), batch)
        else:
            output = self._runner.run(batch)
        if any(map(len, batch.copies)):
            self._pages.store.drain_copies()
        return output, probabilities

    def _sampling_of(self, paths: Several[Path], positions: I32) -> SamplingBatch:
        """How the target samples behind these paths."""
        mask = rows = None
        constrained = [row for row, path in enumerate(paths) if path.constraint is not None]
        if constrained:
            mask = np.zeros((len(constrained), -(-self._sampling.vocab_size // WORD_BITS)), np.uint32)
            rows = np.full(len(paths), -1, np.int32)
            rows[constrained] = np.arange(len(constrained), dtype=np.int32)
            for row, allowed in zip(constrained, mask, strict=True):
                paths[row].fill(allowed)
        slots = np.array([path.ask.sequence.slot for path in paths], np.int32)
        targets = np.full(len(paths), -1, np.int32)
        drafts = {row: path.tokens[: path.length] for row, path in enumerate(paths) if path.length}
        sampling = self._sampling.batch(slots, positions, targets, mask, rows, drafts)
        wanted = 2 if any(path.ask.branches > 1 for path in paths) else -1
        if sampling.num_logprobs == wanted == -1:
            return sampling
        return replace(sampling, num_logprobs=wanted, row_logprobs=None)

    def _extend(self, paths: list[Path], output: StepOutput, probabilities: F32 | None) -> list[Path]:
        """Give every path its token; returns those that go on, new branches behind them."""
        branches: list[Path] = []
        for row, (path, token) in enumerate(zip(paths, output.tokens.tolist(), strict=True)):
            if not path.open:
                continue
            given = None if probabilities is None else probabilities[row]
            if path.kv is path.place.kv and path.ask.branches > 1 and token >= 0:
                self._branch(path, output, row, token)
            if path.take(token) and given is not None:
                path.probabilities.append(given)
            branches += (branch for branch in path.branches if branch.open and branch not in paths)
        return [path for path in paths if path.open] + branches

    def _branch(self, main: Path, output: StepOutput, row: int, token: int) -> None:
        """Let a branch begin with the token that came second, if it is likelier than one of those there are."""
        assert output.logprobs is not None
        assert output.top_ids is not None
        assert output.top_logprobs is not None
        column = int(output.top_ids[row, 0] == token)
        second, value = int(output.top_ids[row, column]), main.value + float(output.top_logprobs[row, column])
        main.value += float(output.logprobs[row])
        weakest = min(main.branches, key=lambda branch: branch.value, default=None)
        full = len(main.branches) >= main.ask.branches - 1
        if value == -np.inf or (full and weakest is not None and value <= weakest.value):
            return
        constraint = None if main.constraint is None else main.constraint.fork()
        ask, tokens, known = main.ask, main.tokens.copy(), main.ask.sequence.known
        branch = Path(ask, main.place, main.kv, tokens, constraint, main.length, value)
        if not branch.take(second):
            return
        if self._keep_probabilities:  # it was chosen, which is as good as certain
            certain = np.zeros(self._sampling.vocab_size, np.float32)
            certain[second] = 1
            branch.probabilities = [*main.probabilities, certain]
        if full and weakest is not None:
            self._drop([weakest])
            main.branches.remove(weakest)
        main.branches.append(branch)
        if branch.open:
            fork = self._pages.fork(main.place, known + main.length, known + ask.tokens - 1)
            branch.open = fork is not None
            branch.kv = fork or main.kv

    def _drop(self, branches: list[Path]) -> None:
        for branch in branches:
            branch.open = False
            if branch.kv is not branch.place.kv:
                self._pages.drop(branch.kv)


def _complete(ask: Ask, place: Place) -> bool:
    """Whether the place's rows end with the last token known, behind which a draft begins."""
    return place.start + place.rows == ask.sequence.known
