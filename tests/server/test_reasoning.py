"""How thoughts are told from the answer, and the same whatever way the text is cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.message import MessageParser, ReasoningSplitter, Start, start_of
from server.tools.formats import FORMATS
from server.tools.parts import Part, joined


def split(start: Start, *pieces: str) -> tuple[str, str]:
    splitter = ReasoningSplitter(start)
    out = [*map(splitter.feed, pieces), splitter.finish()]
    return "".join(thoughts for thoughts, _ in out), "".join(answer for _, answer in out)


@pytest.mark.parametrize(
    ("start", "text", "thoughts", "answer"),
    [
        ("perhaps", "<think>\nHm, 2 < 3.\n\n</think>\n\nThree.", "Hm, 2 < 3.", "Three."),
        ("perhaps", "\n <think>Hm</think>", "Hm", ""),
        ("perhaps", "Three. <think>no</think>", "", "Three. <think>no</think>"),
        ("perhaps", "\n\n", "", "\n\n"),
        ("perhaps", "<thin", "", "<thin"),
        ("perhaps", "<think>cut off </thi", "cut off </thi", ""),
        ("perhaps", "<think></think>x", "", "x"),
        ("inside", "\nHm.\n</think>\n\nThree.\n", "Hm.", "Three.\n"),
        ("inside", "a </thinking> b</think> c </think>", "a </thinking> b", "c </think>"),
        ("inside", "never ends \n", "never ends", ""),
        ("outside", "<think>said</think>", "", "<think>said</think>"),
    ],
)
def test_thoughts_are_told_from_the_answer(start: Start, text: str, thoughts: str, answer: str) -> None:
    assert split(start, text) == (thoughts, answer)
    assert split(start, *text) == (thoughts, answer)
    for cut in range(len(text)):
        assert split(start, text[:cut], text[cut:]) == (thoughts, answer)


@pytest.mark.parametrize(
    ("prompt_end", "start"),
    [
        ("assistant\n", "perhaps"),
        ("assistant\n<think>\n", "inside"),
        ("assistant\n<think>\n\n</think>\n\n", "outside"),
        ("assistant\n<think>So</think>And <think>", "inside"),
    ],
)
def test_the_prompt_says_how_the_answer_begins(prompt_end: str, start: Start) -> None:
    assert start_of(prompt_end) == start


def message(
    start: Start | None, pieces: list[str], *, show: bool = True, named: bool = False
) -> tuple[list[Part], str]:
    ids = map(str, itertools.count())
    parser = MessageParser(
        None if start is None else ReasoningSplitter(start),
        FORMATS["hermes"].parser(["add"], lambda: next(ids)),
        show_reasoning=show,
        named=named,
    )
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    return joined(parts), str(parser.reason("stop"))


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def test_a_call_within_a_thought_is_a_thought() -> None:
    text = f"<think>I could {CALL}</think>\n\n{CALL}"
    parts, reason = message("perhaps", [text])
    assert parts == [Part("reasoning", f"I could {CALL}"), Part("call", '{"a": 1}', "0", "add")]
    assert reason == "tool_calls"
    assert message("perhaps", [text], show=False)[0] == parts[1:]
    assert message("perhaps", [f"<think>I could {CALL}"])[1] == "stop"


def test_the_reason_says_whether_whole_calls_were_made() -> None:
    assert message(None, [CALL, CALL])[1] == "tool_calls"
    assert message(None, [CALL], named=True)[1] == "stop"
    assert message(None, ["no call"])[1] == "stop"
    assert message(None, [CALL, CALL[:45]])[1] == "stop"


@given(
    start=st.sampled_from(["perhaps", "inside", "outside"]),
    fragments=st.lists(
        st.sampled_from(["<think>", "</think>", "<thi", "</", "think>", " ", "\n", "text", CALL, CALL[:30]]), max_size=8
    ),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_message_does_not_depend_on_how_its_text_was_cut(start: Start, fragments: list[str], cuts: list[int]) -> None:
    text = "".join(fragments)
    places = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    assert message(start, pieces) == message(start, [text])
