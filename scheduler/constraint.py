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

    `errors` holds what went wrong while filling: such a row allows everything, and its choice is to be failed.
    `seconds` is how long filling took.
    """

    __slots__ = ("_sequences", "allowed", "errors", "rows", "seconds")

    def __init__(self, sampled: dict[int, Sequence], count: int, vocab_size: int) -> None:
        """`sampled` are the constrained ones among the `count` logit rows."""
        self._sequences = list(sampled.values())
        self.allowed: U32 = np.zeros((len(sampled), -(-vocab_size // WORD_BITS)), np.uint32)  # [M, words]
        self.rows: I32 = np.full(count, -1, np.int32)  # [L] row of `allowed`, -1 for none
        self.rows[list(sampled)] = np.arange(len(sampled), dtype=np.int32)
        self.errors: dict[Sequence, Exception] = {}
        self.seconds = 0.0

    def fill(self) -> None:
        """Ask every constraint. Never raises."""
        began = time.perf_counter()
        for sequence, allowed in zip(self._sequences, self.allowed, strict=True):
            try:
                if sequence.constraint is None:
                    assert sequence.request.constraint is not None
                    sequence.constraint = sequence.request.constraint.fork()
                sequence.constraint.fill(allowed)
            except Exception as error:
                self.errors[sequence] = error
                allowed.fill(0xFFFFFFFF)
        self.seconds = time.perf_counter() - began
