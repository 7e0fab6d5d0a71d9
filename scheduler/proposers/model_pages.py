"""Where a drafting model keeps its keys and values: in a store of its own, or in the target's pages.

Owner: as the proposer (see `scheduler.proposers.base`): `take` to `settle` in the model's thread while no step runs,
`forget` on the event loop between steps. Knows nothing of what is drafted, or how.

    the target's    computed                                      | t |
    its own         computed | catching up ...................... | t | d1 | d2 | d3 |
                                                                   ▲ known - 1
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstore.runs import common_length
from kvstore.sequence import KVSequence
from kvstore.store import KVStore
from scheduler.proposers.base import Ask
from scheduler.request import I32, Sequence


@dataclass(frozen=True, slots=True)
class Place:
    """Pages up to position known + ask.tokens - 1, in which tokens [start, start + rows) are to be computed first.
    Only when these are the last ones known can anything be drafted."""

    kv: KVSequence
    start: int
    rows: int


class DraftPages:
    """What a drafter asks of either kind. As it is here, nothing is the drafter's own: nothing can be forked, and there
    is nothing to remember or to give back."""

    def __init__(self, store: KVStore) -> None:
        self.store = store

    def take(self, asks: list[Ask], budget: int) -> list[Place | None]:
        """A place for each ask, at most `budget` rows in all of them; None for those that have to wait."""
        raise NotImplementedError

    def fork(self, place: Place, length: int, end: int) -> KVSequence | None:
        """Pages up to position `end` that begin with the place's first `length`. None where there are none to be had.
        To be closed by `drop`."""
        return None

    def drop(self, fork: KVSequence) -> None:
        """Give a fork back."""

    def settle(self, ask: Ask, place: Place, drafted: I32) -> None:
        """The rows of the place and of the tokens `drafted` behind them have been computed."""

    def forget(self, sequence: Sequence) -> None:
        """See `Proposer.forget`."""

    def reset(self) -> None:
        """See `Proposer.reset`."""


class TargetPages(DraftPages):
    """The target's own: an approximation is written where the target has reserved room for its drafts, and the step
    that verifies them writes every one of these rows again, exactly. The rest of the pages is only read.

    NOTE: nothing is drafted while copies are pending, so that this never has to touch the target's store.
    """

    def take(self, asks: list[Ask], budget: int) -> list[Place | None]:
        if any(pool.pending() for pool in self.store.pools):
            return [None] * len(asks)
        places: list[Place | None] = []
        for ask in asks:
            kv, start = ask.sequence.kv, ask.sequence.computed
            places.append(Place(kv, start, 1) if kv is not None and start + 1 == ask.sequence.known else None)
        return places


@dataclass(slots=True)
class _Held:
    """A sequence's pages here. Position `known` + i of them holds `drafted[i]`."""

    kv: KVSequence
    known: int = 0
    drafted: I32 | None = None


class OwnPages(DraftPages):
    """A store of its own, with a prefix tree of its own: a shared prompt is not computed again for drafting either.

    Invariant: the sequences in `_held` are those that were drafted for and have not been forgotten, so their number is
    bounded by that of the running ones. A sequence that finds no pages gives all of its pages back, so that those
    which fit go on being drafted for.
    """

    def __init__(self, store: KVStore) -> None:
        super().__init__(store)
        self._held: dict[Sequence, _Held] = {}

    def take(self, asks: list[Ask], budget: int) -> list[Place | None]:
        places: list[Place | None] = [None] * len(asks)
        ready: list[tuple[int, int, KVSequence]] = []
        short = False
        for index, ask in enumerate(asks):
            sequence = ask.sequence
            length = sequence.known + ask.tokens - 1
            held = self._held.get(sequence)
            if held is None:
                if short or length > self.store.max_model_len:
                    continue
                kv = self.store.open(sequence.tokens, sequence.request.namespace)
                if kv is None:
                    continue
                held = self._held[sequence] = _Held(kv)
            self._roll_back(held, sequence)
            if length > self.store.max_model_len or not self.store.reserve(held.kv, length):
                self.forget(sequence)
                short = True
                continue
            ready.append((sequence.known - held.kv.computed, index, held.kv))
        for rows, index, kv in sorted(ready, key=lambda entry: entry[:2]):  # who has least to catch up comes first
            if not budget:
                break
            rows = min(rows, budget)
            budget -= rows
            places[index] = Place(kv, kv.computed, rows)
        return places

    def fork(self, place: Place, length: int, end: int) -> KVSequence | None:
        kv = place.kv
        computed, kv.computed = kv.computed, length
        fork = self.store.fork(kv)
        kv.computed = computed
        if fork is not None and not self.store.reserve(fork, end):
            self.drop(fork)
            return None
        return fork

    def drop(self, fork: KVSequence) -> None:
        self.store.close(fork, np.empty(0, np.int32), 0)

    def settle(self, ask: Ask, place: Place, drafted: I32) -> None:
        sequence, kv, end = ask.sequence, place.kv, place.start + place.rows
        if place.start < sequence.prompt_length:
            # The last token is computed again whenever its draft has come to nothing: its page must not be shared.
            self.store.commit(kv, sequence.tokens, max(place.start, min(end, sequence.known - 1)))
        kv.computed = end + len(drafted)
        held = self._held[sequence]
        held.known, held.drafted = end, drafted

    def forget(self, sequence: Sequence) -> None:
        held = self._held.pop(sequence, None)
        if held is not None:
            self._roll_back(held, sequence)
            self.store.close(held.kv, sequence.tokens, held.kv.computed)

    def reset(self) -> None:
        self.store.reset()

    @staticmethod
    def _roll_back(held: _Held, sequence: Sequence) -> None:
        """Go back to where the drafted tokens and those that came to be part company; the last one known has to be
        computed again in any case, for what follows it."""
        kv = held.kv
        if held.drafted is not None:
            kv.computed = held.known + common_length(held.drafted, sequence.tokens[held.known :])
            held.drafted = None
        kv.computed = min(kv.computed, sequence.known - 1)
