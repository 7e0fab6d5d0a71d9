"""The standard request sets: the same seed gives the same requests, so that servers can be compared.

Prompts are runs of words from Python's own manual, which every installation has; the same Python version makes the
same prompts on every machine. Lengths are in words: each server tokenises for itself. No state outside a call.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

_SHARED_PREFIXES = 5
_SHARED_WORDS = 1000


@dataclass(frozen=True, slots=True)
class Prompt:
    """One completion to ask for."""

    prompt: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class _Source:
    """Draws text. The order of draws is part of a set: changing it changes every prompt after."""

    random: random.Random
    words: Sequence[str]

    def text(self, length: int) -> str:
        """A run of `length` words."""
        start = self.random.randrange(len(self.words) - length)
        return " ".join(self.words[start : start + length])

    def lognormal(self, mean: float, sigma: float, low: int, high: int) -> int:
        """A whole number from the log-normal distribution with this mean, within [low, high]."""
        value = self.random.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)
        return int(min(high, max(low, value)))


def _single(source: _Source, shared: Sequence[str], index: int) -> Prompt:
    return Prompt(source.text(96), 256)


def _decode(source: _Source, shared: Sequence[str], index: int) -> Prompt:
    return Prompt(source.text(24), 256)


def _chat(source: _Source, shared: Sequence[str], index: int) -> Prompt:
    prompt = source.text(source.lognormal(160, 0.9, 8, 900))
    return Prompt(prompt, source.lognormal(120, 0.7, 8, 400))


def _prefix(source: _Source, shared: Sequence[str], index: int) -> Prompt:
    # Nine of ten take the shared texts in turn, the tenth the first one: one prefix is hotter than the others.
    chosen = index % len(shared) if source.random.random() < 0.9 else 0
    return Prompt(f"{shared[chosen]} {source.text(24)}", 32)


def _prefill(source: _Source, shared: Sequence[str], index: int) -> Prompt:
    return Prompt(source.text(900), 1)


def _long(source: _Source, shared: Sequence[str], index: int) -> Prompt:
    return Prompt(source.text(3000), 200)


_SETS: dict[str, Callable[[_Source, Sequence[str], int], Prompt]] = {
    "single": _single,
    "decode": _decode,
    "chat": _chat,
    "prefix": _prefix,
    "prefill": _prefill,
    "long": _long,
}
KINDS = tuple(_SETS)


def make(kind: str, count: int, seed: int = 1, words: Sequence[str] | None = None) -> Iterator[Prompt]:
    """The first `count` prompts of a set. Raises KeyError for a kind that is not one of `KINDS`."""
    make_one = _SETS[kind]
    source = _Source(random.Random(seed), manual_words() if words is None else words)
    shared = [source.text(_SHARED_WORDS) for _ in range(_SHARED_PREFIXES)]
    for index in range(count):
        yield make_one(source, shared, index)


@cache
def manual_words() -> tuple[str, ...]:
    """The words of Python's manual, topic by topic."""
    from pydoc_data.topics import topics

    return tuple(re.findall(r"[A-Za-z][A-Za-z'\-]+", " ".join(topics[name] for name in sorted(topics))))
