"""Answers kept to a format over HTTP. The model chooses by a hash, so whatever is right is the grammar's doing."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import openai
import psutil
import pytest
from support.schemas import random_schema, validate

from server.structured.compiler import GrammarLimits

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mood": {"enum": ["😀", "größer", 'say "hi"', "日本"]},
    },
    "required": ["name", "age", "mood"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "integer", "minimum": 0, "maximum": 9},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            },
            "required": ["v", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


def schema_format(schema: object, **options: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **options}}


def one(answer: dict[str, Any]) -> tuple[str, str]:
    """The text of the only choice and how it ended."""
    choice = answer["choices"][0]
    return choice.get("text", choice.get("message", {}).get("content")), choice["finish_reason"]


@pytest.mark.parametrize("schema", [PERSON, TREE])
@pytest.mark.case(80)
def test_a_schema_is_followed_on_both_routes_streamed_or_not(server: Any, schema: dict[str, Any]) -> None:
    fields = {"response_format": schema_format(schema, strict=True), "seed": 4, "max_tokens": 300}
    for path, content in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "Hello"})):
        text, reason = one(server.post(path, **content, **fields).json())
        assert reason == "stop"
        jsonschema.validate(json.loads(text), schema)
        events = server.events(path, **content, **fields, model=server.model)
        pieces = [event["choices"][0] for event in events[:-1]]
        streamed = "".join(piece.get("text") or piece.get("delta", {}).get("content") or "" for piece in pieces)
        assert (streamed, pieces[-1]["finish_reason"]) == (text, "stop")


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": r"(yes|no)/[0-9]{2}"}, r"(yes|no)/\d\d"),
        ({"choice": ["a", "größe 😀", "two\nlines"]}, "a|größe 😀|two\nlines"),
        ({"grammar": 'start: "x" B{2,3}\nB: /[a-c]/'}, "x[a-c]{2,3}"),
        ({"grammar": 'root ::= ("a" | "b") digit\ndigit ::= [0-9]'}, "[ab][0-9]"),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 9}}, "[3-9]"),
        ({"json": '{"const": "text"}'}, '"text"'),
        ({"json": {"enum": [{"k": [1]}]}, "disable_any_whitespace": True}, r'\{"k":\[1\]\}'),
        ({"json": {"const": [1, 2]}, "whitespace_pattern": "~"}, r"\[~?1~?,~?2~?\]"),
    ],
)
@pytest.mark.case(10)
def test_every_form_is_followed(server: Any, form: dict[str, Any], pattern: str) -> None:
    for seed in range(5):
        text, reason = one(server.complete(max_tokens=60, seed=seed, structured_outputs=form))
        assert re.fullmatch(pattern, text), text
        assert reason == "stop"


def test_a_json_object_is_an_object_and_any_json_is_json(server: Any) -> None:
    whole = 0
    for seed in range(16):
        for fields in ({"response_format": {"type": "json_object"}}, {"response_format": schema_format({})}):
            text, reason = one(server.chat(max_tokens=60, seed=seed, **fields))
            if reason == "stop":
                whole += 1
                value = json.loads(text)
                assert isinstance(value, dict) or fields["response_format"]["type"] == "json_schema"
    assert whole > 3


def test_every_answer_to_a_random_schema_is_valid_unless_cut(server: Any) -> None:
    def ask(number: int) -> str:
        schema = random_schema(random.Random(number))
        answer = server.chat(response_format=schema_format(schema, strict=True), seed=number, max_tokens=400)
        text, reason = one(answer)
        if reason == "length":
            assert answer["usage"]["completion_tokens"] == 400
            return "cut"
        assert reason == "stop"
        validate(schema, text)
        return "valid"

    with ThreadPoolExecutor(8) as threads:
        outcomes = list(threads.map(ask, range(60)))
    assert outcomes.count("valid") > 36, outcomes


@pytest.mark.case(78)
def test_blanks_outside_strings_are_bounded(server: Any) -> None:
    for seed in range(18):
        fields = {"response_format": [{"type": "json_object"}, schema_format(PERSON), schema_format(TREE)][seed % 3]}
        text, _ = one(server.chat(max_tokens=200, seed=seed, temperature=seed % 2, **fields))
        outside = re.sub(r'"(\\.|[^"\\])*("|$)', "s", text)
        assert max(map(len, re.findall(r"\s+", outside)), default=0) <= 12


def test_a_cut_answer_says_so_and_the_exact_length_is_a_stop(server: Any) -> None:
    fields = {"structured_outputs": {"json": PERSON}, "seed": 9}
    whole = server.complete(max_tokens=300, **fields)
    length = whole["usage"]["completion_tokens"]
    for room, reason in ((length - 1, "length"), (length, "stop"), (length + 1, "stop")):
        text, ended = one(server.complete(max_tokens=room, **fields))
        assert ended == reason
        assert one(whole)[0].startswith(text)


def test_each_choice_follows_the_grammar_in_its_own_way(server: Any) -> None:
    answer = server.chat(n=8, seed=1, temperature=1, max_tokens=300, response_format=schema_format(PERSON))
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(set(texts)) > 5
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.case(59)
def test_logprobs_come_with_the_text_and_are_finite(server: Any) -> None:
    fields = {"logprobs": True, "top_logprobs": 20, "seed": 2, "structured_outputs": {"choice": ["yes", "no"]}}
    answer = server.chat(**fields)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == one(answer)[0]
    numbers = [top["logprob"] for entry in entries for top in [entry, *entry["top_logprobs"]]]
    assert all(-9999 <= number <= 0 for number in numbers)


def test_stop_strings_and_min_tokens_work_beside_a_grammar(server: Any) -> None:
    form = {"structured_outputs": {"regex": "(ab )*"}, "max_tokens": 40}
    text, _ = one(server.complete(min_tokens=30, **form))
    assert len(text) >= 30
    assert re.fullmatch("(ab )*(a|ab)?", text)
    form = {"structured_outputs": {"regex": "(ab ){12}"}, "max_tokens": 40}
    assert one(server.complete(stop=["b ab a"], **form)) == ("a", "stop")
    # A text that is complete ends, however many tokens were wanted.
    answer = server.complete(min_tokens=30, max_tokens=40, structured_outputs={"choice": ["yes"]})
    assert one(answer) == ("yes", "stop")
    assert one(server.complete(ignore_eos=True, max_tokens=40, structured_outputs={"choice": ["yes"]})) == (
        "yes",
        "stop",
    )


def test_an_answer_does_not_depend_on_its_neighbours_nor_they_on_it(server: Any) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": f"Hello {number}", "seed": number, "max_tokens": 60, "logprobs": 2}
        | ({"structured_outputs": {"json": PERSON}} if number % 2 else {})
        for number in range(12)
    ]
    alone = [server.complete(**body)["choices"] for body in bodies]
    with ThreadPoolExecutor(12) as threads:
        together = list(threads.map(lambda body: server.complete(**body)["choices"], bodies))
    assert together == alone


# --- what is refused, and that the next request is served

NOT_SCHEMAS = ["", [], 5, "{}", False]


@pytest.mark.parametrize(
    ("response_format", "param"),
    [
        *((schema_format(schema), "response_format.json_schema.schema") for schema in NOT_SCHEMAS),
        (schema_format(None), "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema.schema"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": None}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": PERSON}, "response_format.json_schema.name"),
        ({"type": "json_schema", "schema": PERSON}, "response_format.schema"),
        ({"type": "json_object", "schema": PERSON}, "response_format.schema"),
        ({"type": "json_object", "json_schema": {"name": "x", "schema": {}}}, "response_format.json_schema"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": None}, "response_format.type"),
        ("json_object", "response_format"),
        (schema_format(PERSON, strict="yes"), "response_format.json_schema.strict"),
        (schema_format(PERSON, stict=True), "response_format.json_schema.stict"),
        (schema_format({"type": "strng"}), "response_format.json_schema.schema"),
        (schema_format({"type": "string", "pattern": "(a"}), "response_format.json_schema.schema"),
        (schema_format({"foo": 1}, strict=True), "response_format.json_schema.schema"),
        (schema_format({"$ref": "#/$defs/a"}), "response_format.json_schema.schema"),
        (schema_format({"$ref": "https://example.org/a"}), "response_format.json_schema.schema"),
        (
            schema_format({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
            "response_format.json_schema.schema",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "two words", "schema": {}}},
            "response_format.json_schema.name",
        ),
    ],
)
@pytest.mark.case(10, 80, 81)
def test_a_malformed_response_format_is_a_400_that_names_the_field(
    server: Any, response_format: Any, param: str
) -> None:
    for options in ({}, {"stream": True}):
        error = server.error(server.post(CHAT, messages=HELLO, response_format=response_format, **options), 400)
        assert error["param"] == param
        assert error["message"]
    assert server.chat()["choices"]


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({}, "structured_outputs"),
        ({"json_object": False}, "structured_outputs"),
        ({"json": {}, "regex": "a"}, "structured_outputs"),
        ({"regex": "a", "choice": ["a"], "json_object": True}, "structured_outputs"),
        ({"json": "{"}, "structured_outputs.json"),
        ({"json": 5}, "structured_outputs.json"),
        ({"regex": ""}, "structured_outputs.regex"),
        ({"regex": "(a"}, "structured_outputs.regex"),
        ({"regex": "(?<!a)b"}, "structured_outputs.regex"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": [""]}, "structured_outputs.choice[0]"),
        ({"choice": "a"}, "structured_outputs.choice"),
        ({"grammar": ""}, "structured_outputs.grammar"),
        ({"grammar": "start: b"}, "structured_outputs.grammar"),
        ({"structural_tag": {}}, "structured_outputs.structural_tag"),
        ({"regexp": "a"}, "structured_outputs.regexp"),
        ({"regex": "a", "disable_any_whitespace": True}, "structured_outputs.disable_any_whitespace"),
        ({"json": {}, "whitespace_pattern": "("}, "structured_outputs.json"),
    ],
)
def test_a_malformed_form_is_a_400_that_names_the_field(server: Any, form: Any, param: str) -> None:
    assert server.error(server.post(prompt="Hello", structured_outputs=form), 400)["param"] == param
    assert server.complete(max_tokens=1)["choices"]


def test_forms_that_exclude_each_other_are_refused(server: Any) -> None:
    form = {"structured_outputs": {"regex": "a"}}
    both = server.post(CHAT, messages=HELLO, response_format={"type": "json_object"}, **form)
    assert server.error(both, 400)["param"] == "structured_outputs"
    allowed = server.post(prompt="Hello", allowed_token_ids=[5], **form)
    assert server.error(allowed, 400)["param"] == "allowed_token_ids"
    assert one(server.chat(max_tokens=5, response_format={"type": "text"}, **form)) == ("a", "stop")


def test_a_grammar_that_can_no_longer_be_followed_fails_its_own_request_only(server: Any) -> None:
    pattern = "((a{0,100}){0,100}){0,100}"
    answer = server.post(prompt="Hello", max_tokens=200, structured_outputs={"regex": pattern})
    if answer.status_code != 200:
        assert "kept to the format" in server.error(answer, 400)["message"]
    assert server.complete(max_tokens=1)["choices"]


# --- what is costly to compile


def deep(depth: int) -> dict[str, Any]:
    if depth == 0:
        return {"type": "integer"}
    return {"oneOf": [deep(depth - 1), {"type": "object", "properties": {"a": deep(depth - 1)}}]}


COSTLY: dict[str, dict[str, Any]] = {
    "nested alternatives": deep(6),
    "ten thousand values": {"enum": [f"value {number}" for number in range(10_000)]},
    "a long list": {"type": "array", "items": {"type": "integer"}, "minItems": 90_000, "maxItems": 100_000},
    "a long text": {"type": "string", "maxLength": 100_000},
    "many properties": {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(5000)}},
    "combined divisors": {"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]},
    "combined patterns": {"type": "string", "allOf": [{"pattern": f"[a-z]{{{i}}}x.*"} for i in range(40)]},
    "recursion in a choice": TREE,
}


@pytest.fixture(scope="module")
def limited(serving: Any) -> Iterator[Any]:
    with serving(grammar_limits=GrammarLimits(cpu_seconds=1, memory_bytes=192 << 20)) as served:
        yield served


@pytest.mark.parametrize("name", COSTLY)
@pytest.mark.case(25)
def test_a_costly_schema_is_served_or_refused_in_time_while_others_are_served(limited: Any, name: str) -> None:
    limited.complete(max_tokens=1, structured_outputs={"choice": ["a"]})
    began = time.monotonic()
    with ThreadPoolExecutor(1) as thread:
        costly = thread.submit(
            limited.post, CHAT, messages=HELLO, max_tokens=5, response_format=schema_format(COSTLY[name])
        )
        plain = []
        while not costly.done():
            start = time.monotonic()
            limited.complete(max_tokens=3)
            plain.append(time.monotonic() - start)
        response = costly.result()
    assert time.monotonic() - began < 15
    assert max(plain) < 1
    if response.status_code != 200:
        assert limited.error(response, 400)["param"] == "response_format.json_schema.schema"


@pytest.mark.case(26)
def test_compilations_whose_clients_left_end_and_the_next_is_served(limited: Any) -> None:
    limited.complete(max_tokens=1, structured_outputs={"choice": ["a"]})
    checker = limited.state.grammars._checker

    async def leave(number: int) -> None:
        schema = {"allOf": [{"type": "integer", "multipleOf": 9001 + 2 * number}, {"multipleOf": 9967}]}
        body = {"model": limited.model, "messages": HELLO, "response_format": schema_format(schema)}
        async with httpx.AsyncClient(base_url=limited.url) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post(CHAT, json=body, timeout=0.3)

    async def crowd() -> None:
        await asyncio.gather(*(leave(number) for number in range(20)))

    asyncio.run(crowd())
    limited.wait_until(lambda: limited.state.grammars.compiling == 0)
    limited.wait_until(lambda: not psutil.Process(checker._process.pid).children())
    began = time.monotonic()
    limited.complete(max_tokens=3, structured_outputs={"choice": ["b"]})
    assert time.monotonic() - began < 1
    limited.assert_baseline()


def test_the_official_client_parses_what_it_asked_for(server: Any) -> None:
    from pydantic import BaseModel, Field

    class Step(BaseModel):
        text: str = Field(max_length=5)
        last: bool

    class Plan(BaseModel):
        steps: list[Step] = Field(max_length=2)

    # Not all that pydantic writes is in OpenAI's strict subset, so the schema is given as it is.
    client: openai.OpenAI = server.openai()
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "plan", "schema": Plan.model_json_schema(), "strict": False},
    }
    for seed in range(5):
        answer = client.chat.completions.create(
            model=server.model,
            messages=HELLO,
            seed=seed,
            max_tokens=300,
            response_format=schema,  # type: ignore[call-overload]
        )
        if answer.choices[0].finish_reason == "stop":
            assert Plan.model_validate_json(answer.choices[0].message.content)
