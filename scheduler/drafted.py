"""The drafts that are part of a step, and the pages of their branches. Owned by the engine's task, between steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.sequence import KVSequence
from models.base import StepOutput
from scheduler.proposers.base import Draft
from scheduler.request import Sequence, Status
from scheduler.state import State


@dataclass(slots=True)
class Drafted:
    """A draft that is part of a step. `forks[i]` has the pages of path i + 1; path 0 uses the sequence's own."""

    sequence: Sequence
    draft: Draft
    forks: list[KVSequence] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # the first logit row of each path, once the batch is built

    def best(self, output: StepOutput) -> tuple[int, int]:
        """The path that agrees longest with what was sampled, and how many of its tokens do."""
        best = (0, 0)
        for path, (tokens, row) in enumerate(zip(self.draft.paths, self.rows, strict=True)):
            agree = tokens == output.tokens[row : row + len(tokens)]
            accepted = len(tokens) if agree.all() else int(agree.argmin())
            if accepted > best[1]:
                best = path, accepted
        return best


def branch(state: State, drafted: Drafted) -> list[KVSequence]:
    """Pages for the paths behind the first; fewer when there are none."""
    kv, sequence = state.kv, drafted.sequence
    assert sequence.kv is not None
    writable = sequence.kv.writable
    forks: list[KVSequence] = []
    for path in drafted.draft.paths[1:]:
        fork = kv.fork(sequence.kv) if state.available_pages > len(state.running) + 2 else None
        if fork is None:
            break
        if not kv.reserve(fork, sequence.computed + 1 + len(path)):
            kv.close(fork, sequence.tokens, 0)
            break
        forks.append(fork)
    # Nobody shares the page that comes next any more: its own reservation holds again.
    if not kv.reserve(sequence.kv, min(writable, sequence.computed + 1 + len(drafted.draft.paths[0]))):
        raise RuntimeError("reserved pages were lost to a branch")
    return forks


def release(state: State, step: list[Drafted]) -> None:
    """Give back the pages of branches: those that lost, or all when the step failed."""
    for drafted in step:
        for fork in drafted.forks:
            state.kv.close(fork, drafted.sequence.tokens, 0)
        drafted.forks = []


def adopt(drafted: Drafted, path: int) -> None:
    """Let the sequence go on with the pages of a branch; its own take the branch's place."""
    sequence = drafted.sequence
    if path and sequence.status is Status.RUNNING and sequence.kv is not None:
        sequence.kv, drafted.forks[path - 1] = drafted.forks[path - 1], sequence.kv
