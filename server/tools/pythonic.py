"""Calls written as a Python list, `[f(city="Paris", days=3), g()]`, which is the whole answer or its beginning.

Arguments are literals by keyword, in Python's spelling or in JSON's (True or true). Each is let out as JSON when it is
whole.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Collection
from typing import Any, Literal

from server.tools.parts import CallParser

MAX_NAME_CHARS = 256
KEYWORD = re.compile(r"[\w.-]+")
_NAMES = {"true": True, "false": False, "null": None}
_CLOSING = {"(": ")", "[": "]", "{": "}"}

State = Literal["start", "name", "keyword", "value", "after", "text"]


class PythonicCalls(CallParser):
    """`_raw` is what has to be text if no call comes of it."""

    def __init__(self, names: Collection[str], new_id: Callable[[], str]) -> None:
        super().__init__(names, new_id)
        self._state: State = "start"
        self._raw = ""
        self._written = ""  # of the name, keyword or value being read
        self._keyword = ""
        self._keywords: set[str] = set()
        self._brackets: list[str] = []  # owed inside the value
        self._quote = ""  # around the string being read
        self._escaped = False

    def step(self, char: str) -> None:
        match self._state:
            case "start":
                if char == "[" and not self._raw.strip():
                    self._state = "name"
                    self._raw += char
                elif char.isspace():
                    self._raw += char
                else:
                    self._give_up(char)
            case "name":
                self._step_name(char)
            case "keyword":
                self._step_keyword(char)
            case "value":
                self._step_value(char)
            case "after":
                self._step_after(char)
            case "text":
                self.say(char)

    def end(self) -> None:
        if self._state in ("keyword", "value"):
            self.end_call(whole=False)
        self.say(self._raw)

    def _give_up(self, char: str) -> None:
        raw, self._raw = self._raw, ""
        self._state = "text"
        self.say(raw + char)

    def _break_off(self, char: str) -> None:
        self.end_call(whole=False)
        self._give_up(char)

    def _step_name(self, char: str) -> None:
        name = self._written.strip()
        if char == "(" and name in self.names:
            self.begin_call(name)
            self._raw = self._written = ""
            self._keywords = set()
            self._state = "keyword"
        elif len(self._written) < MAX_NAME_CHARS and (char.isspace() or KEYWORD.fullmatch(name + char)):
            self._written += char
            self._raw += char
        else:
            self._give_up(char)

    def _step_keyword(self, char: str) -> None:
        keyword = self._written.strip()
        if char == ")" and not keyword:
            self.add_arguments("}" if self._keywords else "{}")
            self.end_call(whole=True)
            self._written = ""
            self._state = "after"
        elif char == "=" and KEYWORD.fullmatch(keyword) and keyword not in self._keywords:
            self._keyword, self._written = keyword, ""
            self._brackets, self._quote, self._escaped = [], "", False
            self._state = "value"
        elif len(self._written) < MAX_NAME_CHARS and (char.isspace() or KEYWORD.fullmatch(keyword + char)):
            self._written += char
        else:
            self._break_off(self._written + char)

    def _step_value(self, char: str) -> None:
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == self._quote:
                self._quote = ""
        elif char in "\"'":
            self._quote = char
        elif char in _CLOSING:
            self._brackets.append(_CLOSING[char])
        elif self._brackets and char == self._brackets[-1]:
            self._brackets.pop()
        elif not self._brackets and char in ",)":
            self._end_value(char)
            return
        self._written += char

    def _end_value(self, char: str) -> None:
        try:
            value = json.dumps(literal_of(self._written.strip()), ensure_ascii=False, allow_nan=False)
            value.encode()
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            self._break_off(f"{self._keyword}={self._written}{char}")
            return
        opening = ", " if self._keywords else "{"
        self._keywords.add(self._keyword)
        self.add_arguments(f"{opening}{json.dumps(self._keyword, ensure_ascii=False)}: {value}")
        self._written = ""
        self._state = "keyword"
        if char == ")":
            self._step_keyword(char)

    def _step_after(self, char: str) -> None:
        if char == ",":
            self._raw += char
            self._state = "name"
        elif char == "]":
            self._raw = ""
            self._state = "text"
        elif char.isspace():
            self._raw += char
        else:
            self._give_up(char)


def literal_of(text: str) -> Any:
    """The value of a literal in JSON's spelling or Python's. Raises ValueError, SyntaxError and the like."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes that Python does not know
        expression = ast.parse(text, mode="eval")
    literal = ast.literal_eval(_InPython().visit(expression))
    if not isinstance(literal, str | int | float | bool | list | dict | tuple | None):
        raise ValueError("not a value of JSON")
    return literal


class _InPython(ast.NodeTransformer):
    """Writes JSON's names as Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_NAMES[node.id]) if node.id in _NAMES else node
