"""What there is to compute in a step: masks, moves between the tiers, the model.

Runs in the model's thread, while nothing else touches what it reads. Knows nothing of why the step is as it is.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

from kvstore.store import KVStore
from kvstore.tier import Moves
from models.base import Runner, StepOutput
from scheduler.batch import Step
from scheduler.proposers.base import Ask, Draft, Proposer

if TYPE_CHECKING:
    from models.rejection import LogitsRunner


class Computation:
    """`rejection`: drafts are judged by the rejection rule, beside the batch."""

    def __init__(self, runner: Runner, kv: KVStore, *, rejection: bool) -> None:
        self._runner = runner
        self._kv = kv
        self._rejection = rejection

    def is_all_in_the_batch(self, step: Step) -> bool:
        """Whether the runner alone can do it."""
        return step.masks is None and self._kv.tier is None and not (self._rejection and step.plan.drafts)

    def run(self, step: Step) -> StepOutput:
        if step.masks is not None:
            step.masks.fill()
        tier = self._kv.tier
        if tier is None:
            return self._run_model(step)
        if step.moves is not None:
            tier.move(step.moves, self._runner)
        started, rows = time.perf_counter(), len(step.batch.token_ids)
        output = self._run_model(step)
        if rows >= 2 * max(self._kv.page_size, len(step.plan.sequences)):  # enough prompt in it to tell its cost
            tier.costs.computed(rows, time.perf_counter() - started)
        return output

    def _run_model(self, step: Step) -> StepOutput:
        if not (self._rejection and step.plan.drafts):
            return self._runner.run(step.batch)
        from models.rejection import run_with_rejection

        drafts = [(drafted.draft.paths, drafted.rows, drafted.draft.probabilities) for drafted in step.plan.drafts]
        return run_with_rejection(cast("LogitsRunner", self._runner), step.batch, drafts)

    def propose(self, proposer: Proposer, asks: list[Ask], moves: Moves | None) -> list[Draft]:
        """Drafts, of pages that are filled first."""
        if moves is not None and self._kv.tier is not None:
            self._kv.tier.move(moves, self._runner)
        return proposer.propose(asks)
