"""Stop strings, found wherever they begin and end in the stream of text.

The text is taken character by character, so what is found depends on the text alone and never on how it was cut into
pieces: the match that is complete first, and of those that end together the longest. Text is held back only while it
may still be the beginning of a stop string. Each string has a Knuth-Morris-Pratt automaton, so a character costs the
same whatever was held back.

One `StopMatcher` per choice. Knows nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple


class Found(NamedTuple):
    """What a piece of text gave."""

    text: str  # certain now: no later text can make it part of a match
    stop: str | None = None  # the stop string that ended the text, itself not in it


class StopMatcher:
    """Watches one text for several strings."""

    __slots__ = ("_borders", "_held", "_states", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._borders = tuple(map(borders, self._stops))
        self._states = [0] * len(self._stops)  # how much of each stop string the text ends with
        self._held = ""

    def feed(self, piece: str) -> Found:
        """Add text. After a match the matcher must not be fed again."""
        text = self._held + piece
        first = len(self._held)
        for offset, char in enumerate(piece):
            longest = ""
            for number, stop in enumerate(self._stops):
                state = _advance(stop, self._borders[number], self._states[number], char)
                self._states[number] = state
                if state == len(stop) and state > len(longest):
                    longest = stop
            if longest:
                self._held = ""
                return Found(text[: first + offset + 1 - len(longest)], longest)
        held = max(self._states, default=0)
        self._held = text[len(text) - held :]
        return Found(text[: len(text) - held])

    def finish(self) -> str:
        """The text held back, when no more will come."""
        held, self._held = self._held, ""
        return held


def _advance(stop: str, border: tuple[int, ...], state: int, char: str) -> int:
    while state and stop[state] != char:
        state = border[state - 1]
    return state + (stop[state] == char)


@lru_cache(maxsize=256)
def borders(pattern: str) -> tuple[int, ...]:
    """For each prefix of `pattern`, the length of its longest proper prefix that is also its suffix (Knuth, Morris,
    Pratt: Fast Pattern Matching in Strings, 1977)."""
    table = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = table[length - 1]
        length += pattern[index] == pattern[length]
        table[index] = length
    return tuple(table)
