"""Calls, thoughts and schemas in the responses API and in Anthropic's: the same answer in three forms."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import openai
import pytest

PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "f", "description": "It does.", "parameters": PARAMETERS}}
TOOL: Any = {"type": "function", "name": "f", "description": "It does.", "parameters": PARAMETERS, "strict": False}
ANTHROPIC_TOOL: Any = {"name": "f", "description": "It does.", "input_schema": PARAMETERS}
HELLO: Any = [{"role": "user", "content": "Hello"}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": %d}}\n</tool_call>'
ANSWER = f"<think>\nHm, well.\n</think>\n\nSo be it.\n{CALL % 1}\n{CALL % 2}"


@pytest.fixture(scope="module")
def thinking(serving: Any) -> Iterator[Any]:
    with serving(splits_reasoning=True, limits={"max_model_len": 2048}) as server:
        for tool in (CHAT_TOOL, {**CHAT_TOOL, "function": {**CHAT_TOOL["function"], "strict": False}}):
            prompt = server.post("/tokenize", messages=HELLO, tools=[tool]).json()["tokens"]
            server.script(prompt, ANSWER)
        yield server


@pytest.fixture
def ours(thinking: Any) -> Iterator[openai.OpenAI]:
    with thinking.openai() as client:
        yield client


@pytest.fixture
def theirs(thinking: Any) -> Iterator[anthropic.Anthropic]:
    options: dict[str, Any] = {"base_url": thinking.url, "api_key": "none", "max_retries": 0}
    with anthropic.Anthropic(**options, _strict_response_validation=True) as client:
        yield client


def test_the_chat_has_all_of_it(thinking: Any, ours: openai.OpenAI) -> None:
    message = ours.chat.completions.create(model=thinking.model, messages=HELLO, tools=[CHAT_TOOL]).choices[0].message
    assert message.content == "So be it.\n"
    assert message.to_dict()["reasoning_content"] == "Hm, well."
    assert [json.loads(call.to_dict()["function"]["arguments"]) for call in message.tool_calls or ()] == [
        {"x": 1},
        {"x": 2},
    ]


def test_a_response_has_an_item_for_each(thinking: Any, ours: openai.OpenAI, valid: Callable[[str, Any], None]) -> None:
    response = ours.responses.create(model=thinking.model, input="Hello", tools=[TOOL])
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    thought, said, *calls = (item.to_dict() for item in response.output)
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm, well."}]
    assert said["content"][0]["text"] == "So be it.\n"
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [("f", {"x": 1}), ("f", {"x": 2})]
    assert len({call["call_id"] for call in calls}) == 2
    assert response.status == "completed"
    body = thinking.http.get(f"/v1/responses/{response.id}").json()
    valid("Response", body)
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    # It can be gone on from, and the items can be sent back as they came.
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "ok"} for call in calls]
    follow = thinking.post("/v1/responses", input=results, previous_response_id=response.id, tools=[TOOL])
    again = thinking.post("/v1/responses", input=[*HELLO, *body["output"], *results], tools=[TOOL])
    assert follow.json()["usage"]["input_tokens"] == again.json()["usage"]["input_tokens"]
    assert "x-octavo-ignored" not in again.headers


def test_a_streamed_response_is_put_together_by_the_client(
    thinking: Any, ours: openai.OpenAI, valid: Callable[[str, Any], None]
) -> None:
    whole = ours.responses.create(model=thinking.model, input="Hello", tools=[TOOL])
    with ours.responses.stream(model=thinking.model, input="Hello", tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_response()

    def said(response: Any) -> Any:
        return [{k: v for k, v in item.to_dict().items() if k not in ("id", "call_id", "parsed_arguments")}
                for item in response.output]  # fmt: skip

    assert json.dumps(said(final)).replace(', "parsed": null', "") == json.dumps(said(whole))
    kinds = [event.type.removeprefix("response.") for event in events if not event.type.endswith("delta")]
    item = ["output_item.added", "content_part.added", "{}.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.done", "output_item.done"]
    assert kinds == [
        "created", "in_progress", *[k.format("reasoning_text") for k in item], *[k.format("output_text") for k in item],
        *call, *call, "completed",
    ]  # fmt: skip
    response = thinking.post("/v1/responses", input="Hello", tools=[TOOL], stream=True)
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        event = json.loads(block.split("\n")[1].removeprefix("data: "))
        words = event["type"].replace("output_text", "text").replace(".", "_").split("_")[1:]
        valid("Response" + "".join(map(str.title, words)) + "Event", event)


def test_a_message_has_a_block_for_each(thinking: Any, theirs: anthropic.Anthropic) -> None:
    fields: Any = {"model": thinking.model, "max_tokens": 200, "messages": HELLO, "tools": [ANTHROPIC_TOOL]}
    message = theirs.messages.create(**fields)
    expected = [
        {"type": "thinking", "thinking": "Hm, well.", "signature": ""},
        {"type": "text", "text": "So be it.\n"},
        {"type": "tool_use", "name": "f", "input": {"x": 1}},
        {"type": "tool_use", "name": "f", "input": {"x": 2}},
    ]
    assert [{k: v for k, v in block.to_dict().items() if k != "id"} for block in message.content] == expected
    assert message.stop_reason == "tool_use"
    with theirs.messages.stream(**fields) as stream:
        final = stream.get_final_message()
    assert [
        {k: v for k, v in b.to_dict().items() if k in e} for b, e in zip(final.content, expected, strict=True)
    ] == expected
    assert final.stop_reason == "tool_use"
    results = [
        {"type": "tool_result", "tool_use_id": block.to_dict()["id"], "content": "ok"} for block in message.content[2:]
    ]
    turns = [*HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    assert theirs.messages.create(**{**fields, "messages": turns, "max_tokens": 5}).role == "assistant"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}])
def test_a_response_may_be_made_to_call(thinking: Any, ours: openai.OpenAI, choice: Any) -> None:
    response = ours.responses.create(
        model=thinking.model, input="Call", tools=[TOOL], tool_choice=choice, parallel_tool_calls=False,
        max_output_tokens=400,
    )  # fmt: skip
    calls = [item for item in response.output if item.type == "function_call"]
    assert len(calls) == 1 or response.status == "incomplete"
    error = thinking.error(
        thinking.post("/v1/responses", input="x", tools=[TOOL], tool_choice={"type": "function", "name": "g"}), 400
    )
    assert error["param"] == "tool_choice.name"
    error = thinking.error(thinking.post("/v1/responses", input="x", tools=[{**TOOL, "parameters": {"type": 5}}]), 400)
    assert error["param"].startswith("tools[0].parameters")


def test_nothing_goes_on_from_a_call_that_was_cut(server: Any) -> None:
    parameters = {"type": "object", "properties": {"x": {"type": "string", "minLength": 40}}, "required": ["x"]}
    fields = {"input": "Call", "tools": [{**TOOL, "parameters": parameters}], "tool_choice": "required"}
    for length in range(20, 60):
        response = server.post("/v1/responses", max_output_tokens=length, **fields).json()
        if [item for item in response["output"] if item.get("arguments")]:
            break
    follows = server.post("/v1/responses", input="And?", previous_response_id=response["id"])
    assert server.error(follows, 400)["param"] == "previous_response_id"


@pytest.mark.parametrize("kind", ["any", "tool"])
def test_a_message_may_be_made_to_call(thinking: Any, theirs: anthropic.Anthropic, kind: str) -> None:
    choice: Any = {"type": kind, "disable_parallel_tool_use": True} | ({"name": "f"} if kind == "tool" else {})
    message = theirs.messages.create(
        model=thinking.model, max_tokens=400, messages=HELLO, tools=[ANTHROPIC_TOOL], tool_choice=choice
    )
    assert message.stop_reason in ("tool_use", "max_tokens")
    tool = {**ANTHROPIC_TOOL, "input_schema": {"type": 5}}
    refused = thinking.post("/v1/messages", max_tokens=5, messages=HELLO, tools=[tool]).json()
    assert "'tools[0].input_schema" in refused["error"]["message"]


def test_both_take_a_schema(thinking: Any, ours: openai.OpenAI, theirs: anthropic.Anthropic) -> None:
    schema: Any = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"],
                   "additionalProperties": False}  # fmt: skip
    response = ours.responses.create(
        model=thinking.model, input="Hello", max_output_tokens=300,
        text={"format": {"type": "json_schema", "name": "s", "schema": schema, "strict": True}},
    )  # fmt: skip
    message = theirs.messages.create(
        model=thinking.model, max_tokens=300, messages=HELLO,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )  # fmt: skip
    if response.status == "completed":
        assert set(json.loads(response.output_text)) == {"yes"}
    if message.stop_reason == "end_turn":
        assert set(json.loads(message.content[-1].to_dict()["text"])) == {"yes"}
    bad = {"type": "json_schema", "name": "s", "schema": {"type": "nothing"}}
    error = thinking.error(thinking.post("/v1/responses", input="x", text={"format": bad}), 400)
    assert error["param"].startswith("text.format")
    refused = thinking.post("/v1/messages", max_tokens=9, messages=HELLO, output_config={"format": bad})
    assert "output_config.format" in refused.json()["error"]["message"]
