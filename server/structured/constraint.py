"""A compiled grammar as the scheduler carries it: one matcher for each choice, all made from one prototype.

What may come next depends on the tokens before and on nothing else. The prototype is shared by every request with the
same grammar and is only ever copied; a copy shares the lexer's tables, so it costs microseconds and no memory. See
`scheduler.constraint` for who calls what when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from models.sampling import U32
from scheduler.constraint import WORD_BITS
from scheduler.errors import ConstraintFailed

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_REASON_CHARS = 200


class Prototype:
    """A grammar ready to be followed. `worn` says that it has reached a limit, so that a fresh one is needed."""

    __slots__ = ("grown_bytes", "matcher", "not_ends", "worn")

    def __init__(self, tokenizer: LLTokenizer, grammar: str, eos_token_ids: list[int], grown_bytes: int = 0) -> None:
        """Compile it; takes the processor for as long as the checker said. Raises ValueError for a bad one."""
        from llguidance import LLMatcher

        self.matcher = LLMatcher(tokenizer, grammar, log_level=0)
        self.not_ends: U32 = np.full(-(-tokenizer.vocab_size // WORD_BITS), 0xFFFFFFFF, np.uint32)
        for token in eos_token_ids:
            self.not_ends[token // WORD_BITS] &= ~np.uint32(1 << token % WORD_BITS)
        self.grown_bytes = grown_bytes
        self.worn = False
        if not self.matcher.is_error():
            self.matcher.compute_bitmask()
        if self.matcher.is_error():
            raise ValueError(self.matcher.get_error())


class GrammarConstraint:
    """See `scheduler.constraint.TokenConstraint`."""

    __slots__ = ("_matcher", "_prototype", "finished")

    def __init__(self, prototype: Prototype, matcher: LLMatcher | None = None) -> None:
        self._prototype = prototype
        self._matcher = prototype.matcher if matcher is None else matcher
        self.finished = False

    def fill(self, allowed: U32) -> None:
        """Raises ConstraintFailed when finding out takes too much work."""
        self._matcher.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
        self._check()
        self.finished = not (allowed & self._prototype.not_ends).any()

    def accept(self, token: int) -> None:
        """Raises ConstraintFailed for a token that was not allowed."""
        self._matcher.consume_token(token)
        self._check()
        self.finished = self._matcher.is_stopped()

    def fork(self) -> GrammarConstraint:
        return GrammarConstraint(self._prototype, self._matcher.deep_copy())

    def _check(self) -> None:
        if self._matcher.is_error():
            self._prototype.worn = True
            reason = self._matcher.get_error().partition("\n")[0][:MAX_REASON_CHARS]
            raise ConstraintFailed(f"the grammar cannot be followed any further: {reason}")
