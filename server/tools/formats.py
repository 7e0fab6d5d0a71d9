"""The functions a client offers, the ways in which models write calls of them, and which a model was taught.

Each way has a parser and a grammar, which agree: what the grammar allows, the parser reads as calls that are whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from secrets import token_hex
from typing import Any, Literal

from server.errors import wrong
from server.structured.grammar import json_of, literal
from server.structured.schema import rebased
from server.tools.json_calls import ARGS, JsonCalls
from server.tools.parts import CallParser
from server.tools.pythonic import KEYWORD, PythonicCalls

MAX_CALLS = 16  # that one answer is allowed by a grammar
_COMBINING = frozenset({"$ref", "allOf", "anyOf", "oneOf", "patternProperties", "minProperties", "maxProperties"})
CALLS = "calls"  # the rule that all of them together are

NewId = Callable[[], str]
Mark = Callable[[str], str]  # a mark as a grammar names it: some are tokens of their own, which no text can spell


@dataclass(frozen=True, slots=True)
class Tool:
    """One function. `definition` is what templates are shown; `parameters` the schema that calls are kept to."""

    name: str
    definition: Mapping[str, Any]
    parameters: dict[str, Any]  # prepared: see `server.structured.schema`
    field: str  # where the client defined it


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What to do with the tools. `mode` "named" is "required" with one tool, but for how the answer says it ended."""

    tools: Sequence[Tool]  # those that may be called
    mode: Literal["auto", "required", "named"]
    parallel: bool  # whether several calls may be made

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools)

    @property
    def forced(self) -> bool:
        return self.mode != "auto"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way. `marks` are texts that may be special tokens and have to be seen all the same."""

    name: str
    parser: Callable[[Collection[str], NewId], CallParser]
    rules: Callable[[Sequence[Tool], bool, Mark], str]
    marks: tuple[str, ...]
    new_id: NewId = lambda: f"call_{token_hex(12)}"


def _repeated(call: str, separator: str, parallel: bool) -> str:
    return f"{call} ({separator} {call}){{0,{MAX_CALLS - 1}}}" if parallel else call


def _objects(tools: Sequence[Tool], key: str) -> str:
    """The rule `call`: one of the tools as a JSON object, with its arguments under `key`."""
    lines = []
    for number, tool in enumerate(tools):
        head = '{"name": ' + literal(tool.name) + f', "{key}": '
        lines += [f'call_{number}: {literal(head)} arguments_{number} "}}"']
        lines += [f"arguments_{number}: {json_of(tool.parameters)}"]
    return "\n".join(["call: " + " | ".join(f"call_{number}" for number in range(len(tools))), *lines])


def _hermes(tools: Sequence[Tool], parallel: bool, mark: Mark) -> str:
    tagged = f'{mark("<tool_call>")} "\\n" call "\\n" {mark("</tool_call>")}'
    return f"{CALLS}: {_repeated('tagged', _NEWLINE, parallel)}\ntagged: {tagged}\n{_objects(tools, 'arguments')}"


def _llama(tools: Sequence[Tool], parallel: bool, _: Mark) -> str:
    return f"{CALLS}: {_repeated('call', literal('; '), parallel)}\n{_objects(tools, 'parameters')}"


def _mistral(tools: Sequence[Tool], parallel: bool, mark: Mark) -> str:
    listed = f'"[" {_repeated("call", literal(", "), parallel)} "]"'
    return f"{CALLS}: {mark('[TOOL_CALLS]')} {listed}\n{_objects(tools, 'arguments')}"


def _pythonic(tools: Sequence[Tool], parallel: bool, _: Mark) -> str:
    lines = [f'{CALLS}: "[" {_repeated("call", literal(", "), parallel)} "]"']
    lines += ["call: " + " | ".join(f"call_{number}" for number in range(len(tools)))]
    for number, tool in enumerate(tools):
        lines += _keywords(f"call_{number}", tool)
    return "\n".join(lines)


def _keywords(rule: str, tool: Tool) -> list[str]:
    """The rules of a call with its arguments by keyword, in the order of the schema.

    Values are written as JSON, which the parser reads as well as Python. Raises InvalidRequest for a schema that says
    more of the arguments than what each of them is.
    """
    properties: Mapping[str, Any] = tool.parameters.get("properties") or {}
    required = set(tool.parameters.get("required") or ())
    plain = _COMBINING.isdisjoint(tool.parameters) and required <= properties.keys()
    if not plain or not all(map(KEYWORD.fullmatch, properties)):
        raise wrong(
            f"{tool.field}.parameters",
            "must be a list of properties with plain names: this model writes arguments by keyword",
        )
    rules = []
    for number, name in enumerate(properties):
        own = "#/$defs/the-parameters"
        pointer = name.replace("~", "~0").replace("/", "~1")
        definitions = {"the-parameters": rebased(tool.parameters, own)}
        schema = {"$ref": f"{own}/properties/{pointer}", "$defs": definitions}
        rules.append(f"{rule}_{number}: {literal(name + '=')} value_{rule}_{number}")
        rules.append(f"value_{rule}_{number}: {json_of(schema)}")
    # `start_n`: the arguments from the n-th on; `then_n`: the same, when some came before them.
    for state, separator in (("start", ""), ("then", literal(", ") + " ")):
        for number, name in enumerate(properties):
            skip = "" if name in required else f" | {rule}_{state}_{number + 1}"
            rules.append(f"{rule}_{state}_{number}: {separator}{rule}_{number} {rule}_then_{number + 1}{skip}")
        rules.append(f'{rule}_{state}_{len(properties)}: ""')
    return [f'{rule}: {literal(tool.name + "(")} {rule}_start_0 ")"', *rules]


_NEWLINE = literal("\n")
FORMATS: Mapping[str, CallFormat] = {
    known.name: known
    for known in (
        CallFormat(
            "hermes",
            partial(JsonCalls, opening="<tool_call>", closing="</tool_call>"),
            _hermes,
            ("<tool_call>", "</tool_call>"),
        ),
        CallFormat(
            "llama3_json",
            partial(JsonCalls, opening="<|python_tag|>", bare=True, separator=";"),
            _llama,
            ("<|python_tag|>",),
        ),
        CallFormat(
            "mistral",
            partial(JsonCalls, opening="[TOOL_CALLS]", named=True),
            _mistral,
            ("[TOOL_CALLS]", ARGS),
            lambda: token_hex(5)[:9],  # the length that its templates insist on
        ),
        CallFormat("pythonic", PythonicCalls, _pythonic, ()),
    )
}


def taught_by(template: str | None) -> CallFormat:
    """The format that a chat template speaks of; Hermes' where it speaks of none, for that is what the system text of
    `server.chat_template` then asks for."""
    for pattern, name in _SIGNS:
        if template is not None and re.search(pattern, template):
            return FORMATS[name]
    return FORMATS["hermes"]


# What gives a template away, the surest first.
_SIGNS = (
    (r"<tool_call>", "hermes"),
    (r"\[TOOL_CALLS\]", "mistral"),
    (r"\[func_name\d?\(", "pythonic"),
    (r"<\|python_tag\|>|\"parameters\": dictionary", "llama3_json"),
)
