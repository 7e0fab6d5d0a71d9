"""The requests of `POST /v1/messages` and of its `count_tokens`, and the chat request that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from server.errors import shown, unsupported, wrong
from server.protocol.chat import MAX_MESSAGES, PART_SEPARATOR, Content, Effort, Turns
from server.protocol.fields import Fields, Int, JSONObject, Label, SamplingFields, Stops

# What a complaint about the chat request means for this one.
RENAMED = {
    r"^stop\b": "stop_sequences",
    r"^response_format(\.json_schema)?\b": "output_config.format",
    r"^reasoning_effort\b": "output_config.effort",
    r"^thinking_token_budget\b": "thinking.budget_tokens",
    r"\.function\.parameters\b": ".input_schema",
    r"\.function\b": "",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessageTurn(Fields):
    role: Literal["user", "assistant"]
    content: str | Annotated[list[JSONObject], Field(min_length=1)]


class MessageMetadata(Fields):
    user_id: Label | None = None


class Thinking(Fields):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Int, Field(ge=1)] | None = None


class OutputConfig(Fields):
    effort: Effort | None = None
    format: JSONObject | None = None


class ToolChoice(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: Label | None = None
    disable_parallel_tool_use: bool | None = None


class CountTokensRequest(SamplingFields):
    """What shapes a prompt."""

    messages: Annotated[list[MessageTurn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Content = None
    tools: list[JSONObject] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: JSONObject | None = None


class MessageRequest(CountTokensRequest):
    """Anthropic's fields for a text model, and the extensions that all routes have."""

    max_tokens: Annotated[Int, Field(ge=1)]
    stop_sequences: Stops | None = None
    metadata: MessageMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


def chat_of(fields: CountTokensRequest, body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of the chat request; `body` is what `fields` were made of. Raises InvalidRequest."""
    turns = Turns([] if fields.system is None else [{"role": "system", "content": fields.system}])
    for index, turn in enumerate(fields.messages):
        _add(turns, turn, f"messages[{index}].content")
    config, choice = fields.output_config, fields.tool_choice
    chat = {
        **{name: body[name] for name in SamplingFields.model_fields if name in body},
        "messages": turns.messages,
        "max_tokens": body.get("max_tokens"),
        "stop": body.get("stop_sequences"),
        "reasoning_effort": config and config.effort,
        "response_format": config and _format(config.format),
        "tools": [_tool(tool, f"tools[{index}]") for index, tool in enumerate(fields.tools or ())] or None,
        # The client opens the answer, and gets what follows.
        "continue_final_message": fields.messages[-1].role == "assistant" or None,
    }
    budget = None if fields.thinking is None else fields.thinking.budget_tokens
    if budget is not None:
        chat["thinking_token_budget"] = budget
        if isinstance(fields, MessageRequest) and budget >= fields.max_tokens:
            raise wrong("thinking.budget_tokens", f"({budget}) must be smaller than 'max_tokens'")
    if fields.thinking is not None and fields.thinking.type != "adaptive":
        chat["chat_template_kwargs"] = {"enable_thinking": fields.thinking.type == "enabled"}
    if choice is not None and fields.tools:
        named = {"type": "function", "function": {"name": choice.name}}
        chat["tool_choice"] = _CHOICES.get(choice.type, named)
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return {name: value for name, value in chat.items() if value is not None}


def _add(turns: Turns, turn: MessageTurn, place: str) -> None:
    if isinstance(turn.content, str):
        turns.say(turn.role, turn.content)
        return
    texts: list[str] = []
    for index, block in enumerate(turn.content):
        where = f"{place}[{index}]"
        kind = (turn.role, block.get("type"))
        if kind[1] == "text":
            texts.append(_string(block, "text", where))
            continue
        if texts:
            turns.say(turn.role, PART_SEPARATOR.join(texts))
            texts = []
        match kind:
            case "user", "tool_result":
                turns.result(_string(block, "tool_use_id", where), _result(block.get("content"), f"{where}.content"))
            case "assistant", "tool_use":
                turns.call(_string(block, "id", where), _string(block, "name", where), block.get("input"))
            case "assistant", "thinking":
                turns.think(_string(block, "thinking", where))
            case _:
                raise unsupported(f"{where}.type", f"cannot be {shown(kind[1])} in a text model's turn")
    if texts:
        turns.say(turn.role, PART_SEPARATOR.join(texts))


def _string(block: Mapping[str, Any], name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise wrong(f"{place}.{name}", f"must be a string, not {shown(value)}", "invalid_type")
    return value


def _result(content: object, place: str) -> str:
    """A tool's result: text, or a list of text blocks."""
    if not isinstance(content, list):
        return _string({"content": content or ""}, "content", place.removesuffix(".content"))
    blocks = [block if isinstance(block, dict) else {} for block in content]
    return PART_SEPARATOR.join(_string(block, "text", f"{place}[{index}]") for index, block in enumerate(blocks))


def _format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": given.get("schema")}}


def _tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    if tool.get("type", "custom") not in ("custom", None):
        raise unsupported(f"{place}.type", "must be 'custom': there are no built-in tools")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    optional = {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, **optional}}
