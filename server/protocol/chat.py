"""The request of `POST /v1/chat/completions`, and its messages in the form chat templates take; also how those are put
together from the smaller pieces that other APIs have.

Contents are a string or a list of text parts; parts are joined with a newline. Everything that is not text is refused
by name. Knows nothing of the template: how roles degrade is decided in `server.chat_template`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import orjson
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from server.protocol.fields import Fields, GenerationFields, Int, JSONObject, Label
from server.protocol.tools import MAX_TOOLS, Choice, ToolDefinition

MAX_MESSAGES = 4096
PART_SEPARATOR = "\n"

_RESERVED_TEMPLATE_NAMES = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


def _content(value: object) -> object:
    """A string, or the joined text of a list of parts."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content_type", "must be a string or a list of text parts")
    if not value:
        raise PydanticCustomError("content_empty", "must hold at least one part")
    return PART_SEPARATOR.join(_part(part) for part in value)


def _part(part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise PydanticCustomError("content_type", "must hold parts that are objects with a type")
    kind = part.get("type")
    if kind not in ("text", "refusal", "input_text", "output_text", "reasoning_text"):
        raise PydanticCustomError("content_part", "must hold only parts of type 'text': this is a text model")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise PydanticCustomError("content_type", "must have a string 'text' in each text part")
    return text


def _arguments(value: object) -> object:
    """A call's arguments as the object that templates want; the wire has it as JSON text."""
    if value in (None, ""):
        return {}
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            raise PydanticCustomError("arguments", "must be JSON") from None
    if not isinstance(value, dict):
        raise PydanticCustomError("arguments_type", "must be a JSON object")
    return value


Content = Annotated[str | None, BeforeValidator(_content, json_schema_input_type=str | list[JSONObject] | None)]
Arguments = Annotated[JSONObject, BeforeValidator(_arguments, json_schema_input_type=str | JSONObject | None)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class CalledFunction(Fields):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Arguments = Field(default_factory=dict)


class ToolCall(Fields):
    id: Label | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Fields):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: Label | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Label | None = None
    audio: None = None  # clients send back what they were given, nulls included
    function_call: None = None

    def for_template(self) -> dict[str, Any]:
        """The message as templates see it: no nulls, arguments as objects, contents as strings."""
        message = self.model_dump(include=set(Message.model_fields), exclude_none=True)
        message.setdefault("content", message.pop("refusal", ""))
        return message


class Turns:
    """A conversation in the making. What an assistant thinks, says and calls in a row is one turn."""

    def __init__(self, history: Iterable[dict[str, Any]] = ()) -> None:
        self.messages: list[dict[str, Any]] = list(history)
        self._growing: dict[str, Any] = {}

    def say(self, role: str, text: str | None) -> None:
        if role == "assistant":
            self._assistant("content", "tool_calls")["content"] = text
        else:
            self.messages.append({"role": role, "content": text})

    def think(self, text: str) -> None:
        self._assistant("reasoning_content", "content", "tool_calls")["reasoning_content"] = text

    def call(self, call_id: str | None, name: str | None, arguments: Mapping[str, Any] | None) -> None:
        function = {"name": name, "arguments": arguments}
        calls = self._assistant().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str | None, text: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _assistant(self, *taken: str) -> dict[str, Any]:
        """The assistant's turn that is last and has none of these yet, or a new one."""
        turn = self._growing
        if not self.messages or self.messages[-1] is not turn or not turn.keys().isdisjoint(taken):
            turn = self._growing = {"role": "assistant"}
            self.messages.append(turn)
        return turn


def _template_kwargs(value: object) -> object:
    if isinstance(value, dict):
        for name in _RESERVED_TEMPLATE_NAMES:
            if name in value:
                raise PydanticCustomError("template_kwargs", f"must not set '{name}', which has a field of its own")
    return value


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class ChatCompletionRequest(GenerationFields):
    """OpenAI's fields and vLLM's extensions for a text model. What is refused by name is in `checks`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[Int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Int, Field(ge=0)] | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: Effort | None = None
    service_tier: Literal["auto", "default"] | None = None
    metadata: Metadata | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    thinking_token_budget: Annotated[Int, Field(ge=-1)] | None = Field(None, description="-1 for no limit")
    include_reasoning: bool | None = Field(None, description="false leaves reasoning_content out")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[JSONObject, BeforeValidator(_template_kwargs)] | None = None
    documents: list[JSONObject] | None = None


class TokenizeChatRequest(ChatCompletionRequest):
    """A conversation; of the fields that /v1/chat/completions has, those that shape the prompt matter."""

    return_token_strs: bool | None = None
