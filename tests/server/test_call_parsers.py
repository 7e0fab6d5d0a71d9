"""How calls are told from text: every form models write them in, and the same whatever way the text is cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.tools.formats import FORMATS
from server.tools.parts import Part, joined

NAMES = ("get_weather", "add", "no-args", "Füße")
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}"}]}}\n</tool_call>'
NESTED = {"text": 'quo"tes \\ and {braces} ] </tool_call> <tool_call> é 😀\n', "n": -1.5e-3, "o": {"x": [], "y": {}}}
LONG = {"text": "long " * 2000}


def parse(form: str, pieces: Iterable[str]) -> tuple[list[Part], int, int]:
    """All parts, and how many calls there were and were whole."""
    ids = map(str, itertools.count())
    parser = FORMATS[form].parser(NAMES, lambda: next(ids))
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.feed(piece)
    return joined([*parts, *parser.finish()]), parser.calls, parser.complete


def said(form: str, text: str) -> list[object]:
    """Texts as they are, calls as (name, arguments)."""
    parts, _, _ = parse(form, [text])
    return [(part.name, json.loads(part.text)) if part.kind == "call" else part.text for part in parts]


def call(name: str, arguments: object, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


FORMS: list[tuple[str, str, list[object]]] = [
    ("hermes", HERMES, [("add", {"a": 1, "b": [2, {"c": "}"}]})]),
    ("hermes", f"Let me see.\n{HERMES}\n", ["Let me see.\n", ("add", {"a": 1, "b": [2, {"c": "}"}]})]),
    ("hermes", f"\n\n{HERMES}\n{HERMES}", [("add", {"a": 1, "b": [2, {"c": "}"}]})] * 2),
    ("hermes", f"a{HERMES} b {HERMES}", ["a", ("add", {"a": 1, "b": [2, {"c": "}"}]}), " b ", ("add", {"a": 1, "b": [2, {"c": "}"}]})]),  # noqa: E501
    ("hermes", f"<tool_call>{call('add', NESTED)}</tool_call>", [("add", NESTED)]),
    ("hermes", f"<tool_call>{call('add', LONG)}", [("add", LONG)]),
    ("hermes", f"<tool_call>{call('add', NESTED, 'parameters')}</tool_call>", [("add", NESTED)]),
    ("hermes", f"<tool_call>{call('add', json.dumps(NESTED))}</tool_call>", [("add", NESTED)]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "id": 7, "name": "Füße"}</tool_call>', [("Füße", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}, "id": null, "more": [true]}</tool_call>', [("add", {"a": 1})]),  # noqa: E501
    ("hermes", '<tool_call>{"name": "no-args"}</tool_call>', [("no-args", {})]),
    ("hermes", '<tool_call>{"name": "no-args", "arguments": null}</tool_call>', [("no-args", {})]),
    ("hermes", '<tool_call>{"name": "no-args", "arguments": ""}</tool_call>', [("no-args", {})]),
    ("hermes", f"<tool_call>[{call('add', {})}, {call('no-args', {})}]</tool_call>!", [("add", {}), ("no-args", {}), "!"]),  # noqa: E501
    ("hermes", "  plain <b>text</b> {}", ["  plain <b>text</b> {}"]),
    ("hermes", " \n", [" \n"]),
    ("hermes", "", []),
    ("hermes", f"<tool_call>{call('unknown', {})}</tool_call>", [f"<tool_call>{call('unknown', {})}</tool_call>"]),
    ("hermes", "<tool_call> <tool_call>" + call("add", {}), ["<tool_call> ", ("add", {})]),
    ("hermes", "<tool_call>nonsense</tool_call>", ["<tool_call>nonsense</tool_call>"]),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}', ['<tool_call>{"name": 5, "arguments": {}}']),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}', ['<tool_call>{"name": "add", "arguments": [1]}']),
    ("hermes", '<tool_call>{"name": "add"', ['<tool_call>{"name": "add"']),
    ("hermes", "a <tool_ca", ["a <tool_ca"]),
    ("hermes", f"<tool_call>{call('add', {})}</tool_ca", [("add", {})]),
    ("llama3_json", call("add", NESTED, "parameters"), [("add", NESTED)]),
    ("llama3_json", f"\n {call('add', {}, 'parameters')}; {call('add', NESTED)}", [("add", {}), ("add", NESTED)]),
    ("llama3_json", f"Hm. <|python_tag|>{call('add', {})}", ["Hm. ", ("add", {})]),
    ("llama3_json", f"<|python_tag|>{call('add', {})}", [("add", {})]),
    ("llama3_json", f"[{call('add', {})},{call('add', {})}]", [("add", {}), ("add", {})]),
    ("llama3_json", '{"answer": 42}', ['{"answer": 42}']),
    ("llama3_json", '{"name": "Paris", "parameters": {}}', ['{"name": "Paris", "parameters": {}}']),
    ("llama3_json", "[1, 2] and so on", ["[1, 2] and so on"]),
    ("mistral", f"[TOOL_CALLS] [{call('add', NESTED)}, {call('no-args', {})}]", [("add", NESTED), ("no-args", {})]),
    ("mistral", "Now [TOOL_CALLS]add[ARGS]" + json.dumps(NESTED), ["Now ", ("add", NESTED)]),
    ("mistral", "[TOOL_CALLS]add{}[TOOL_CALLS]no-args[ARGS] {}", [("add", {}), ("no-args", {})]),
    ("mistral", "[TOOL_CALLS]other{}", ["[TOOL_CALLS]other{}"]),
    ("mistral", f"[TOOL_CALLS][{call('add', {})}] done", [("add", {}), " done"]),
    ("pythonic", "[add(a=1, b='x')]", [("add", {"a": 1, "b": "x"})]),
    ("pythonic", '[get_weather(city="Pa,r)is]", ok=True, no=false, none=None), no-args()]', [("get_weather", {"city": "Pa,r)is]", "ok": True, "no": False, "none": None}), ("no-args", {})]),  # noqa: E501
    ("pythonic", "[add(a=[1, {'k': (true, \"it's\")}], b={\"x\": null})]", [("add", {"a": [1, {"k": [True, "it's"]}], "b": {"x": None}})]),  # noqa: E501
    ("pythonic", " [add(a='\\'é😀\\n', )] ok", [("add", {"a": "'é😀\n"}), " ok"]),
    ("pythonic", "[add(from='x', class=1)]", [("add", {"from": "x", "class": 1})]),
    ("pythonic", "[1, 2]", ["[1, 2]"]),
    ("pythonic", "[other(a=1)]", ["[other(a=1)]"]),
    ("pythonic", "Text [add(a=1)]", ["Text [add(a=1)]"]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "expected"), FORMS, ids=[f"{f}: {t[:60]}" for f, t, _ in FORMS])
def test_calls_are_found_and_the_rest_stays_text(form: str, text: str, expected: list[object]) -> None:
    assert said(form, text) == expected
    _, calls, complete = parse(form, [text])
    assert calls == complete == sum(isinstance(item, tuple) for item in expected)


BROKEN = [
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": tru', '{"a": tru', ""),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": trap}}</tool_call>', '{"a": trap}', ""),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "x\ny"}}', '{"a": "x\ny"}', ""),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": ]} so } it', '{"a": ]', " so } it"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": ]}} it', '{"a": ]', "} it"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": ] b', '{"a": ]', "b"),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 01} and so on', '{"a": 01}', " and so on"),
    ("llama3_json", '{"name": "add", "parameters": {"a" 1}} and so on', '{"a" 1}', " and so on"),
    ("pythonic", "[add(a=1, b=f(x), c=3)]", '{"a": 1', "b=f(x), c=3)]"),
    ("pythonic", "[add(a=1, b=", '{"a": 1', ""),
]


@pytest.mark.parametrize(("form", "text", "arguments", "rest"), BROKEN)
def test_a_call_that_breaks_off_ends_there_and_is_not_whole(form: str, text: str, arguments: str, rest: str) -> None:
    parts, calls, complete = parse(form, [text])
    assert (calls, complete) == (1, 0)
    assert parts[0] == Part("call", arguments, "0", "add")
    assert "".join(part.text for part in parts[1:]) == rest


# Texts made of what could confuse the parsers, cut anywhere.
FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<tool_", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "[", "]", "{", "}", ","),
    *(call("add", NESTED), call("no-args", {}), call("other", {}), '{"name": "add", "arguments": {"a": [1', "add"),
    *("[add(a=1, b='x')]", "[add(", "a=", "'", '"', ")", " ", "\n", "text", "é", "😀", HERMES, "\\", "null", "1.5"),
    *("add{}", ";"),
]  # fmt: skip


@given(
    form=st.sampled_from(sorted(FORMATS)),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=8),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_what_comes_out_does_not_depend_on_how_the_text_was_cut(
    form: str, fragments: list[str], cuts: list[int]
) -> None:
    text = "".join(fragments)
    places = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    whole = parse(form, [text])
    assert parse(form, pieces) == whole == parse(form, text)


@given(form=st.sampled_from(sorted(FORMATS)), fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=6))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_what_is_out_after_a_beginning_is_the_same_however_it_came(form: str, fragments: list[str]) -> None:
    text = "".join(fragments)[:200]

    def out(pieces: Sequence[str]) -> list[Part]:
        ids = map(str, itertools.count())
        parser = FORMATS[form].parser(NAMES, lambda: next(ids))
        return joined([part for piece in pieces for part in parser.feed(piece)])

    for end in range(0, len(text), 7):
        assert out(text[:end]) == out([text[:end]])


@given(form=st.sampled_from(sorted(FORMATS)), text=st.text(max_size=40))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_text_without_calls_comes_out_unchanged(form: str, text: str) -> None:
    parts, calls, _ = parse(form, [text])
    assert calls == 0
    assert "".join(part.text for part in parts) == text


@pytest.mark.case(69)
def test_every_cut_in_two_of_every_form_gives_the_same() -> None:
    for form, text, _ in FORMS:
        whole = parse(form, [text])
        for cut in range(0, len(text), max(1, len(text) // 200)):
            assert parse(form, [text[:cut], text[cut:]]) == whole, (form, text, cut)


@pytest.mark.case(68)
def test_a_call_begins_with_its_name_once_and_goes_on_with_arguments_only() -> None:
    ids = map(str, itertools.count())
    parser = FORMATS["hermes"].parser(NAMES, lambda: next(ids))
    parts = [part for char in f"{HERMES}\n{HERMES}" for part in parser.feed(char)]
    assert [part.name for part in parts if part.name] == ["add", "add"]
    assert [part.call_id for part in parts if part.name] == ["0", "1"]
    assert len(parts) > 20
