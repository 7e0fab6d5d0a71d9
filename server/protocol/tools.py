"""`tools` and `tool_choice`, and the rules on calls in a conversation's history.

Every failure is an InvalidRequest whose `param` names the field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from server.errors import shown, wrong
from server.protocol.fields import Fields, JSONObject
from server.structured.schema import prepared
from server.tools.formats import Tool, ToolChoice

MAX_TOOLS = 128

Mode = Literal["auto", "required", "named"]


def _choice(value: object) -> object:
    if not isinstance(value, str | dict):
        raise PydanticCustomError("choice_type", "must be a string or an object that names a function")
    return value


Choice = Annotated[str | JSONObject, BeforeValidator(_choice, json_schema_input_type=str | JSONObject)]


class FunctionDefinition(Fields):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: JSONObject | None = None
    strict: bool | None = None


class ToolDefinition(Fields):
    type: Literal["function"]
    function: FunctionDefinition

    def tool(self, field: str) -> Tool:
        """`strict` refuses keywords that JSON Schema does not have. Properties that are not listed are not called with,
        unless the schema says that there may be others."""
        place = f"{field}.function.parameters"
        schema = prepared(
            self.function.parameters or {"properties": {}}, place, strict=bool(self.function.strict), close_objects=True
        )
        kinds = schema.get("type", "object")
        if kinds != "object" and "object" not in (kinds if isinstance(kinds, list) else ()):
            raise wrong(place, f"must describe an object, not {shown(kinds)}")
        return Tool(
            self.function.name,
            self.model_dump(exclude_none=True),
            {**schema, "type": "object"},
            f"{field}.function",
        )


def tool_choice(
    tools: Sequence[ToolDefinition] | None, choice: str | JSONObject | None, parallel: bool | None
) -> ToolChoice | None:
    """What calls the model may make; None when it may make none."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise wrong("tool_choice", "is only allowed with 'tools'")
        if parallel is not None:
            raise wrong("parallel_tool_calls", "is only allowed with 'tools'")
        return None
    offered: dict[str, Tool] = {}
    for index, definition in enumerate(tools):
        tool = definition.tool(f"tools[{index}]")
        if tool.name in offered:
            raise wrong(f"{tool.field}.name", f"is the name of an earlier tool: {shown(tool.name)}")
        offered[tool.name] = tool
    several = parallel is not False
    match choice:
        case None | "auto":
            return ToolChoice(list(offered.values()), "auto", several)
        case "none":
            return None
        case "required":
            return ToolChoice(list(offered.values()), "required", several)
        case {"type": "function", **rest}:
            named = _offered(rest.get("function", rest), offered, "tool_choice.function")
            return ToolChoice([named], "named", parallel=False)
        case {"type": "allowed_tools", **rest}:
            return _allowed(rest.get("allowed_tools", rest), offered, several)
    raise wrong("tool_choice", f"must be 'none', 'auto', 'required' or name a function, not {shown(choice)}")


def _allowed(allowed: Any, offered: dict[str, Tool], several: bool) -> ToolChoice:
    place = "tool_choice.allowed_tools"
    if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required"):
        raise wrong(f"{place}.mode", "must be 'auto' or 'required'")
    chosen = allowed.get("tools")
    if not isinstance(chosen, list) or not chosen:
        raise wrong(f"{place}.tools", "must be a list with at least one tool")
    tools: dict[str, Tool] = {}
    for index, tool in enumerate(chosen):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        found = _offered(function, offered, f"{place}.tools[{index}].function")
        tools[found.name] = found
    return ToolChoice(list(tools.values()), allowed["mode"], several)


def _offered(function: Any, offered: dict[str, Tool], place: str) -> Tool:
    name = function.get("name") if isinstance(function, dict) else None
    param = f"{place}.name"
    if not isinstance(name, str):
        raise wrong(param, f"must be a string, not {shown(name)}", "invalid_type")
    if name not in offered:
        raise wrong(param, f"is {shown(name)}, and 'tools' has no function of that name")
    return offered[name]
