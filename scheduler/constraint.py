"""What a choice may say, decided token by token by whoever made the request; the scheduler only carries it.

A `TokenConstraint` is opaque here: a grammar, a set, anything whose next tokens depend on the tokens before them and on
nothing else, so that a constrained choice is as repeatable as any other. Each choice has one of its own, which keeps
its place when the choice loses its pages: nothing has to be replayed.

    fork ──▶ fill ──▶ accept ──▶ fill ──▶ accept ──▶ ... ──▶ finished
           model's    engine's
           thread     task

`Masks` are those of one step. The engine's task makes and reads them, the model's thread fills them before it runs the
step; never both at once.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import numpy as np

from models.sampling import I32, U32

if TYPE_CHECKING:
    from scheduler.request import Sequence

WORD_BITS = 32


class TokenConstraint(Protocol):
    """Which tokens may come next. One thread at a time calls it."""

    @property
    def finished(self) -> bool:
        """Whether nothing may follow but the end of the text. The choice then ends by itself, with reason "stop"."""

    def fill(self, allowed: U32) -> None:
        """Set the bits of the tokens that may come next and clear the others: [ceil(vocab / 32)], as `SamplingBatch`
        has them. Raises when it cannot."""

    def accept(self, token: int) -> None:
        """An allowed token has become part of the output. Raises when it cannot go on."""

    def fork(self) -> TokenConstraint:
        """A constraint of its own in the same state."""


class Masks:
    """The masks of the constrained rows of one step.

    `errors` holds what went wrong while filling, by logit row: such a row allows everything, and its choice is to be
    failed if it gets there. `finished` are the rows at which nothing may follow but the end of the text. `seconds` is
    how long filling took.
    """

    __slots__ = ("_asked", "allowed", "errors", "finished", "rows", "seconds")

    def __init__(self, asked: list[tuple[int, Sequence, I32]], count: int, vocab_size: int) -> None:
        """`asked` has the first logit row, among `count`, of each constrained sequence, and the drafted tokens behind
        which it has the rows that follow."""
        self._asked = asked
        masks = sum(1 + len(drafted) for _, _, drafted in asked)
        self.allowed: U32 = np.zeros((masks, -(-vocab_size // WORD_BITS)), np.uint32)  # [M, words]
        self.rows: I32 = np.full(count, -1, np.int32)  # [L] row of `allowed`, -1 for none
        mask = 0
        for row, _, drafted in asked:
            self.rows[row : row + 1 + len(drafted)] = np.arange(mask, mask + 1 + len(drafted))
            mask += 1 + len(drafted)
        self.errors: dict[int, Exception] = {}
        self.finished: set[int] = set()
        self.seconds = 0.0

    def fill(self) -> None:
        """Ask every constraint. Never raises."""
        began = time.perf_counter()
        for row, sequence, drafted in self._asked:
            try:
                if sequence.constraint is None:
                    assert sequence.request.constraint is not None
                    sequence.constraint = sequence.request.constraint.fork()
                self._fill(row, sequence.constraint)
            except Exception as error:
                self._fail(row, error)
                continue
            if len(drafted) and row not in self.finished:
                self._fill_behind(row, sequence.constraint, drafted)
        self.seconds = time.perf_counter() - began

    def _fill(self, row: int, constraint: TokenConstraint) -> None:
        constraint.fill(self.allowed[self.rows[row]])
        if constraint.finished:
            self.finished.add(row)

    def _fill_behind(self, row: int, constraint: TokenConstraint, drafted: I32) -> None:
        """The rows behind drafted tokens, as far as these are allowed: nobody gets beyond one that is not."""
        row += 1
        try:
            constraint = constraint.fork()
            for token in drafted.tolist():
                if not self.allowed[self.rows[row - 1], token // WORD_BITS] >> np.uint32(token % WORD_BITS) & 1:
                    break
                constraint.accept(token)
                if constraint.finished:
                    break
                self._fill(row, constraint)
                if constraint.finished:
                    break
                row += 1
        except Exception as error:
            self._fail(row, error)

    def _fail(self, row: int, error: Exception) -> None:
        self.errors[row] = error
        self.allowed[self.rows[row]] = 0xFFFFFFFF
