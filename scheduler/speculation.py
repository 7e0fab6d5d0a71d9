"""Speculative decoding: how far to draft, and what a verified draft is worth.

A drafted sequence gets a row for its last token and one for each drafted token. The logits of all of them are sampled
with the noise that belongs to their positions, so the token of each row is the one the undrafted run would have there
as long as the rows before it agree with the draft: those are kept, the first that differs too, and the rest is
forgotten. Text, logprobs and finish reason cannot depend on what was drafted.

    known     ... t4 |                     draft  d1 d2 d3
    rows          t4   d1   d2   d3
    sampled       d1   d2   x    .         two accepted, x is the bonus token; d3's row is not looked at

How far to draft is decided for each step anew, sequence by sequence, the most senior first: one token more is drafted
while that raises the expected tokens per second of the step, by the sequence's measured acceptance a (the j-th drafted
token counts with probability a^j) and the measured cost of rows (`scheduler.step_times`) and of drafting. In steps
with prompts nothing is drafted, unless it always is: those whose first token is waited for, and those who decode, would
wait longer. Drafts take what the budget has left over and pages that nobody is waiting for: they are the first thing
given up.

Owned by the engine's task, between steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Several

from models.base import StepOutput
from scheduler.acceptance import Acceptance
from scheduler.drafted import Drafted, branch
from scheduler.plan import StepPlan
from scheduler.proposers.base import Ask, Draft, Proposer, Verified
from scheduler.request import Sequence
from scheduler.state import State

logger = logging.getLogger(__name__)

FIRST_GUESS = 0.7  # acceptance of a proposer that nothing is known about
PROBE_AFTER = 32  # steps without a draft after which a sequence is tried again


class Speculation:
    """`tokens` and `branches` are the longest draft and the most paths; without `adaptive` they are always asked for.

    `seconds` is the time of a step by its rows.
    """

    def __init__(
        self,
        proposer: Proposer,
        seconds: Callable[[int], float],
        *,
        tokens: int,
        branches: int = 1,
        adaptive: bool = True,
        rejection: bool = False,
    ) -> None:
        self.proposer = proposer
        self.rejection = rejection
        self._seconds = seconds
        self._tokens = tokens
        self._branches = branches
        self._adaptive = adaptive
        self._general = Acceptance()
        self._reset = False  # asked for while the proposer may be at work: done before it is asked again

    def reset(self) -> None:
        """Draft nothing more from what ended sequences have left behind."""
        self._reset = True

    def allot(self, state: State, planned: StepPlan) -> list[Ask]:
        """Who may be drafted for and how far; pages are reserved for it."""
        if self._reset:
            self._reset = False
            self.proposer.reset()
        spare = planned.spare
        if self._adaptive and max(planned.rows) > 1:
            return []
        asking = [
            sequence
            for sequence, rows in zip(planned.sequences, planned.rows, strict=True)
            if rows == 1
            and sequence.computed + 1 == sequence.known
            and not (sequence.scoring or sequence.forks)
            and sequence.finish_requested is None
            and sequence not in planned.admitted
        ]
        if not asking or not spare:
            return []
        rows = len(planned.rows)
        tokens, time = float(rows), self._seconds(rows)
        drafting = self.proposer.seconds(len(asking)) / len(asking)
        prior = self._general.estimate(FIRST_GUESS)
        asks = []
        for sequence in asking:
            most = min(self._tokens, sequence.known_limit - sequence.known - 1, spare)
            wanted = most
            if self._adaptive:
                sequence.undrafted += 1
                wanted, likely = 0, 1.0
                acceptance = sequence.acceptance.estimate(prior)
                while wanted < most:
                    likely *= acceptance
                    extra = self._seconds(rows + 1) - self._seconds(rows) + drafting
                    if likely * time <= tokens * extra:
                        break
                    wanted, rows, tokens, time = wanted + 1, rows + 1, tokens + likely, time + extra
                # A model that has not drafted for it would have to read all of it first.
                cheap = sequence.drafted_tokens > 0 or not self.proposer.runs_model
                if not wanted and most > 0 and sequence.undrafted > PROBE_AFTER and cheap:
                    wanted, rows = 1, rows + 1
            wanted = self._reserve(state, sequence, wanted)
            if wanted > 0:
                branches = min(self._branches, 1 + (spare - wanted) // (wanted + 1))
                asks.append(Ask(sequence, wanted, branches))
                spare -= wanted + (branches - 1) * (wanted + 1)
        return asks

    @staticmethod
    def _reserve(state: State, sequence: Sequence, wanted: int) -> int:
        """As many of the wanted tokens as there are pages for, beside one for each running sequence to grow into."""
        pages = sequence.kv
        assert pages is not None
        length = sequence.computed + 1 + wanted
        if pages.writable < length and state.available_pages > len(state.running) + 1 + wanted // state.kv.page_size:
            state.kv.reserve(pages, length)
        return min(wanted, pages.writable - sequence.computed - 1)

    def take(self, state: State, asks: list[Ask], drafts: Several[Draft]) -> list[Drafted]:
        """The drafts that become part of the step, each with the pages its branches need."""
        taken = []
        for ask, draft in zip(asks, drafts, strict=True):
            if not draft.paths:
                continue
            drafted = Drafted(ask.sequence, draft)
            ask.sequence.undrafted = 0
            if len(draft.paths) > 1:
                drafted.forks = branch(state, drafted)
                keep = 1 + len(drafted.forks)
                probabilities = None if draft.probabilities is None else draft.probabilities[:keep]
                drafted.draft = Draft(draft.paths[:keep], probabilities)
            taken.append(drafted)
        return taken

    def verified(
        self, step: list[Drafted], accepted: dict[Sequence, int], output: StepOutput
    ) -> tuple[tuple[str, int, int], ...]:
        """Learn from an applied step. Errors of the proposer are logged: it only loses by them.

        Returns for each draft the proposer, how long its longest path was and how many tokens were accepted."""
        seen, counts = [], []
        for drafted in step:
            count = accepted[drafted.sequence]
            longest = max(map(len, drafted.draft.paths))
            drafted.sequence.acceptance.note(count, longest)
            self._general.note(count, longest)
            seen.append(Verified(drafted.sequence, drafted.draft, drafted.rows, count, output))
            counts.append((self.proposer.name, longest, count))
        try:
            self.proposer.observe(seen)
        except Exception:
            logger.exception("%s could not learn from a step", self.proposer.name)
        return tuple(counts)
