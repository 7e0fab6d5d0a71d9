"""The paths of a draft while a model drafts them.

Owner: the proposer's call. Knows nothing of steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvstore.sequence import KVSequence
from models.sampling import U32
from scheduler.constraint import TokenConstraint
from scheduler.proposers.base import F32, Ask, Draft
from scheduler.proposers.model_pages import Place
from scheduler.request import I32


@dataclass(slots=True, eq=False)
class Path:
    """A path while it is drafted: the first `length` of its `tokens` are there. While `open`, another one follows."""

    ask: Ask
    place: Place
    kv: KVSequence  # in whose pages its rows are written
    tokens: I32  # [ask.tokens]
    constraint: TokenConstraint | None
    length: int = 0
    value: float = 0.0  # log probability: of a main path so far, of a branch at its first own token
    open: bool = True
    probabilities: list[F32] = field(default_factory=list)
    branches: list[Path] = field(default_factory=list)  # of a main path

    def take(self, token: int) -> bool:
        """One token more, unless it cannot be: a failed row's, or one that the constraint cannot go on from."""
        constraint = self.constraint
        self.open = False
        if token < 0 or (constraint is not None and constraint.finished):
            return False
        if constraint is not None:
            try:
                constraint.accept(token)
            except Exception:  # whatever is wrong, the target's own row will find it
                return False
        self.tokens[self.length] = token
        self.length += 1
        ended = token in self.ask.sequence.stop_ids or (constraint is not None and constraint.finished)
        self.open = self.length < self.ask.tokens and not ended
        return True

    def fill(self, allowed: U32) -> None:
        """The mask of its next row. Without one the row's token means nothing, and the path ends there."""
        assert self.constraint is not None
        try:
            self.constraint.fill(allowed)
        except Exception:
            allowed.fill(0xFFFFFFFF)
            self.open = False


def main_path(ask: Ask, place: Place) -> Path:
    constraint = ask.sequence.constraint
    if constraint is None:  # nothing has been asked of it yet
        constraint = ask.sequence.request.constraint
    tokens = np.empty(ask.tokens, np.int32)
    return Path(ask, place, place.kv, tokens, None if constraint is None else constraint.fork())


def draft_of(main: Path) -> Draft:
    paths = [path for path in (main, *sorted(main.branches, key=lambda branch: -branch.value)) if path.length]
    probabilities = [np.stack(path.probabilities) for path in paths if path.probabilities]
    return Draft([path.tokens[: path.length] for path in paths], probabilities or None)
