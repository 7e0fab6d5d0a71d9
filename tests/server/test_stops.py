"""Stop strings are found wherever they lie, and nothing of them gets out before."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.stops import StopMatcher

ALPHABET = st.sampled_from("ab")


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By the definition: the match that is complete first, the longest of those that end together."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def fed(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    out = []
    for piece in pieces:
        found = matcher.feed(piece)
        out.append(found.text)
        if found.stop is not None:
            return out, found.stop
    return [*out, matcher.finish()], None


def cuts(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("one two three", ["two"]),
        ("aaab", ["aab"]),
        ("abcabcabd", ["abcabd"]),
        ("stop and stopped", ["stopped", "stop"]),
        ("stop and stopped", ["stop", "stopped"]),
        ("xabcdx", ["abcdefgh", "cd"]),
        ("ends with the stop", ["stop"]),
        ("nothing here", ["###", "\n\n"]),
        ("line\n\nline", ["\n\n"]),
        ("emoji 👨‍👩‍👧 here", ["👩"]),
        ("ananas banana", ["nana", "anas"]),
        ("", ["x"]),
    ],
)
@pytest.mark.case(54)
def test_every_cut_of_a_text_gives_the_same(text: str, stops: list[str]) -> None:
    expected = reference(text, stops)
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            out, stop = fed([text[:first], text[first:second], text[second:]], stops)
            assert ("".join(out), stop) == expected
    out, stop = fed(list(text), stops)
    assert ("".join(out), stop) == expected


@settings(max_examples=400)
@given(
    st.text(ALPHABET, max_size=40),
    st.lists(st.text(ALPHABET, min_size=1, max_size=6), min_size=1, max_size=4),
    st.lists(st.integers(0, 40), max_size=6),
)
@pytest.mark.case(54)
def test_any_text_any_stops_any_cuts(text: str, stops: list[str], places: list[int]) -> None:
    out, stop = fed(cuts(text, places), stops)
    assert ("".join(out), stop) == reference(text, stops)


@settings(max_examples=400)
@given(
    st.text(ALPHABET, max_size=40),
    st.lists(st.text(ALPHABET, min_size=1, max_size=6), min_size=1, max_size=4),
)
def test_text_is_held_back_exactly_while_it_may_begin_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    released = ""
    for position, char in enumerate(text, 1):
        found = matcher.feed(char)
        released += found.text
        if found.stop is not None:
            return
        seen = text[:position]
        held = max((size for stop in stops for size in range(len(stop)) if seen.endswith(stop[:size])), default=0)
        assert released == seen[: len(seen) - held]
