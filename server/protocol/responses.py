"""The request of `POST /v1/responses`, and the chat request that it stands for.

Every item of the input is one flat model, whatever its type: which fields an item needs is checked where it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import BeforeValidator, Field

from server.errors import missing, shown, unsupported, wrong
from server.protocol.chat import MAX_MESSAGES, Arguments, Content, Effort, Metadata, Turns
from server.protocol.fields import Fields, Int, JSONObject, Label, SamplingFields, StreamOptions

# What a complaint about the chat request means for this one.
RENAMED = {
    r"^messages\b": "input",
    r"^max_completion_tokens\b": "max_output_tokens",
    r"^response_format(\.json_schema)?\b": "text.format",
    r"^reasoning_effort\b": "reasoning.effort",
    r"\.function\b": "",
}
LOGPROBS = "message.output_text.logprobs"


def _input(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class InputItem(Fields):
    """One item: a message, a call, a call's result, or what was thought."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content = None
    call_id: Label | None = None
    name: Label | None = None
    arguments: Arguments | None = None
    output: Content = None
    id: Label | None = None
    status: Label | None = None
    summary: list[JSONObject] | None = None
    encrypted_content: None = None

    def add_to(self, turns: Turns, place: str) -> None:
        """Raises InvalidRequest for a field that its type needs and that is not there."""
        needed = {"message": ("role", "content"), "function_call": ("name",), "function_call_output": ("output",)}
        for name in needed.get(self.type, ()):
            if getattr(self, name) is None:
                raise missing(f"{place}.{name}")
        match self.type:
            case "message":
                turns.say(self.role or "", self.content)
            case "function_call":
                turns.call(self.call_id, self.name, self.arguments)
            case "function_call_output":
                turns.result(self.call_id, self.output or "")
            case "reasoning" if self.content:
                turns.think(self.content)

    def listed(self, item_id: str) -> dict[str, Any]:
        """The item as the list of a response's input has it, its texts as the model read them."""
        item: dict[str, Any] = {"type": self.type, "id": self.id or item_id, "status": self.status or "completed"}
        match self.type:
            case "message":
                said: dict[str, Any] = {"type": "input_text", "text": self.content}
                if self.role == "assistant":
                    said |= {"type": "output_text", "annotations": [], "logprobs": []}
                return {**item, "role": self.role, "content": [said]}
            case "function_call":
                arguments = orjson.dumps(self.arguments or {}).decode()
                return {**item, "call_id": self.call_id, "name": self.name, "arguments": arguments}
            case "function_call_output":
                return {**item, "call_id": self.call_id, "output": self.output}
        thoughts = [] if self.content is None else [{"type": "reasoning_text", "text": self.content}]
        return {**item, "summary": self.summary or [], "content": thoughts}


class ResponseText(Fields):
    format: JSONObject | None = None
    verbosity: Literal["medium"] | None = None


class ResponseReasoning(Fields):
    effort: Effort | None = None
    summary: Literal["auto"] | None = None


class ResponseRequest(SamplingFields):
    """OpenAI's fields for a text model, and the extensions that all routes have."""

    input: Annotated[
        list[InputItem],
        BeforeValidator(_input, json_schema_input_type=str | list[InputItem]),
        Field(min_length=1, max_length=MAX_MESSAGES),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[Int, Field(ge=1)] | None = None
    max_tool_calls: Annotated[Int, Field(ge=1)] | None = None
    top_logprobs: Annotated[Int, Field(ge=0)] | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    text: ResponseText | None = None
    reasoning: ResponseReasoning | None = None
    tools: list[JSONObject] | None = None
    tool_choice: str | JSONObject | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: Label | None = None
    store: bool | None = None
    background: bool | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    metadata: Metadata | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    stream_options: StreamOptions | None = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())


def chat_of(
    fields: ResponseRequest, body: Mapping[str, Any], history: Sequence[dict[str, Any]]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The body of the chat request, and its messages without the instructions.

    `body` is what `fields` were made of; `history` are the messages before. Raises InvalidRequest.
    """
    if fields.stream and fields.background:
        raise unsupported("background", "is only supported without 'stream'")
    if fields.background and fields.store is False:
        raise wrong("background", "needs 'store'")
    turns = Turns(history)
    for index, item in enumerate(fields.input):
        item.add_to(turns, f"input[{index}]")
    system = [] if fields.instructions is None else [{"role": "system", "content": fields.instructions}]
    chat = {
        **{name: body[name] for name in SamplingFields.model_fields if name in body},
        "messages": [*system, *turns.messages],
        "max_completion_tokens": fields.max_output_tokens,
        "logprobs": fields.wants_logprobs or None,
        "top_logprobs": fields.top_logprobs if fields.wants_logprobs else None,
        "response_format": fields.text and _format(fields.text.format),
        "reasoning_effort": fields.reasoning and fields.reasoning.effort,
        "tools": [_tool(tool, index) for index, tool in enumerate(fields.tools or ())] or None,
        "tool_choice": _tool_choice(fields.tool_choice) if fields.tools else None,
        "parallel_tool_calls": fields.parallel_tool_calls if fields.tools else None,
        "stream_options": body.get("stream_options"),
    }
    return {name: value for name, value in chat.items() if value is not None}, turns.messages


def _format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}


def _tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise unsupported(f"tools[{index}].type", f"must be 'function', not {shown(tool.get('type'))}")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice
