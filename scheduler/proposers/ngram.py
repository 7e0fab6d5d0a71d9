"""Prompt lookup: what came after the last tokens the time before, in the sequence itself or in a neighbour's output.

Source: Saxena, "Prompt Lookup Decoding", 2023; over other requests' outputs, Oliaro et al., "SuffixDecoding", 2024.
Owned by the engine's task.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import numpy as np

from scheduler.proposers.base import Ask, Draft, Verified
from scheduler.request import I32, Sequence

MAX_SHARED_TOKENS = 1 << 15  # recent output remembered in one namespace
MAX_NAMESPACES = 64
_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class SuffixIndex:
    """Where each run of `shortest` to `longest` tokens ended last. Adding a token costs the same in any length.

    Runs are found by a rolling hash and compared token by token, so that a collision finds nothing wrong.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self.tokens: list[int] = []
        self._lengths = range(longest, shortest - 1, -1)
        self._ends: dict[int, dict[int, int]] = {length: {} for length in self._lengths}
        self._indexed = 0  # runs that end before or at this many tokens are in `_ends`

    def extend(self, tokens: I32) -> None:
        """Add tokens. The run that ends with the very last one is indexed with the next call: it is what is looked up
        meanwhile."""
        self.tokens += tokens.tolist()
        end = len(self.tokens) - 1
        begin = max(0, self._indexed - self._lengths[0] + 1)
        window = np.array(self.tokens[begin:end], np.uint64) + np.uint64(1)
        for length in self._lengths:
            first = max(self._indexed + 1, length)
            if first <= end:
                hashes = np.zeros(end - first + 1, np.uint64)
                for offset in range(first - length - begin, first - begin):
                    hashes = hashes * np.uint64(_FACTOR) + window[offset : offset + len(hashes)]
                self._ends[length].update(zip(hashes.tolist(), range(first, end + 1), strict=True))
        self._indexed = max(end, self._indexed)

    def find(self, suffix: list[int]) -> int | None:
        """Where the longest of the runs that end `suffix` ended last; None when there is none."""
        for length in self._lengths:
            if len(suffix) >= length:
                run, key = suffix[-length:], 0
                for token in run:
                    key = (key * _FACTOR + token + 1) & _MASK
                end = self._ends[length].get(key)
                if end is not None and self.tokens[end - length : end] == run:
                    return end
        return None

    def follow(self, end: int, count: int) -> list[int]:
        """The tokens from `end` on; where they run out, the ones just read again, as in a text that repeats itself."""
        tokens, size = self.tokens, len(self.tokens)
        draft: list[int] = []
        for place in range(end, end + count):
            draft.append(tokens[place] if place < size else draft[place - size])
        return draft


class NgramProposer:
    """See `scheduler.proposers.base.Proposer`. Memory: an index for each running sequence, and with `share_outputs` one
    for each of the MAX_NAMESPACES latest namespaces."""

    name = "ngram"
    runs_model = False

    def __init__(self, shortest: int, longest: int, *, share_outputs: bool = False) -> None:
        self._bounds = shortest, longest
        self._share_outputs = share_outputs
        self._own: dict[Sequence, SuffixIndex] = {}
        self._shared: OrderedDict[Hashable, SuffixIndex] = OrderedDict()

    def seconds(self, sequences: int) -> float:
        return 0.0

    def propose(self, asks: list[Ask]) -> list[Draft]:
        return [self._propose(ask.sequence, ask.tokens) for ask in asks]

    def _propose(self, sequence: Sequence, count: int) -> Draft:
        index = self._own.get(sequence)
        if index is None:
            index = self._own[sequence] = SuffixIndex(*self._bounds)
        index.extend(sequence.buffer[len(index.tokens) : sequence.known])
        suffix = index.tokens[-self._bounds[1] :]
        for source in (index, self._shared.get(sequence.request.namespace)):
            end = None if source is None else source.find(suffix)
            if source is not None and end is not None:
                draft = source.follow(end, min(count, len(source.tokens) - end) if source is not index else count)
                if draft:
                    return Draft([np.array(draft, np.int32)])
        return Draft()

    def observe(self, verified: list[Verified]) -> None:
        """The sequences' own tokens tell everything."""

    def forget(self, sequence: Sequence) -> None:
        self._own.pop(sequence, None)
        if self._share_outputs and sequence.outputs.size:
            namespace = sequence.request.namespace
            index = self._shared.pop(namespace, None) or SuffixIndex(*self._bounds)
            if len(index.tokens) > MAX_SHARED_TOKENS:
                kept = np.array(index.tokens[MAX_SHARED_TOKENS // 2 :], np.int32)
                index = SuffixIndex(*self._bounds)
                index.extend(kept)
            index.extend(sequence.outputs[-MAX_SHARED_TOKENS // 2 :])
            self._shared[namespace] = index
            if len(self._shared) > MAX_NAMESPACES:
                self._shared.popitem(last=False)

    def reset(self) -> None:
        self._shared.clear()
