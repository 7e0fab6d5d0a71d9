"""One call written as a JSON object, `{"name": ..., "arguments": {...}}`, read character by character."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, Literal

import orjson

from server.tools.nesting import Nesting
from server.tools.parts import CallParser

_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*\{', re.DOTALL)

Outcome = Literal["open", "whole", "failed"]


class CallReader:
    """Tells `parser` of a call as soon as it is sure to be one: when its name is known and its arguments begin. A call
    with other keys before them, or whose arguments are a string of JSON, is known by its end only.

    `text` is what was read of it until then. With `name`, only the arguments are in the text.
    """

    __slots__ = ("_arguments", "_level", "_names", "_nesting", "_parser", "_state", "begun", "text")

    def __init__(self, parser: CallParser, names: Collection[str], name: str | None = None) -> None:
        self.text = ""
        self.begun = name is not None
        self._parser = parser
        self._names = names
        self._nesting = Nesting()
        self._level = 1 if name is None else 0  # brackets around the arguments
        self._state: Literal["head", "arguments", "behind", "others"] = "head" if name is None else "arguments"
        self._arguments: list[str] = []
        if name is not None:
            parser.begin_call(name)

    def feed(self, char: str) -> Outcome:
        """Take the next character. After a failure it is not part of `text`."""
        self._nesting.feed(char)
        match self._state:
            case "arguments":
                self._add(char)
                if self._nesting.depth > self._level:
                    return "open"
                self._state = "behind"
                return "open" if self._level else self._ended()
            case "behind" | "others":
                if self._nesting.depth == 0:
                    return self._ended()
                if char == ",":
                    self._state = "others"
                return "open" if self._state == "others" or char.isspace() else self._ended(failed=True)
        if self._nesting.depth == 0:
            return self._whole(self.text + char)
        if char == "{" and (head := _HEAD.fullmatch(self.text + char)) is not None:
            name = _json(head[1])
            if name not in self._names:
                return "failed"
            self._begin(name)
            self._add(char)
        self.text += char
        return "open"

    def _whole(self, text: str) -> Outcome:
        """The object has ended, and was not known for a call before."""
        call = _json(text)
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or name not in self._names:
            return "failed"
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, dict):
            arguments = orjson.dumps(arguments).decode()
        if not isinstance(arguments or "{}", str) or not isinstance(_json(arguments or "{}"), dict):
            return "failed"
        self._begin(name)
        self._add(arguments or "{}")
        return self._ended()

    def _begin(self, name: str) -> None:
        self.begun, self._state = True, "arguments"
        self._parser.begin_call(name)

    def _add(self, text: str) -> None:
        self._arguments.append(text)
        self._parser.add_arguments(text)

    def _ended(self, *, failed: bool = False) -> Outcome:
        self._parser.end_call(whole=isinstance(_json("".join(self._arguments)), dict))
        return "failed" if failed else "whole"


def _json(text: str) -> Any:
    """Its value; None for what is not JSON."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
