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

from server.tools.parts import CallParser, Nesting

MAX_NAME_CHARS = 256
KEYWORD = re.compile(r"[\w.-]+")
_NAMES = {"true": True, "false": False, "null": None}

State = Literal["start", "name", "argument", "after", "text"]


class PythonicCalls(CallParser):
    """`_raw` is what has to be text if no call comes of it."""

    def __init__(self, names: Collection[str], new_id: Callable[[], str]) -> None:
        super().__init__(names, new_id)
        self._state: State = "start"
        self._raw = ""
        self._written = ""  # of the name or argument being read
        self._keywords: set[str] = set()
        self._nesting = Nesting()

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
            case "argument":
                self._step_argument(char)
            case "after":
                self._step_after(char)
            case "text":
                self.say(char)

    def end(self) -> None:
        if self._state == "argument":
            self.end_call(whole=False)
        self.say(self._raw)

    def _give_up(self, char: str) -> None:
        raw, self._raw = self._raw, ""
        self._state = "text"
        self.say(raw + char)

    def _step_name(self, char: str) -> None:
        name = self._written.strip()
        if char == "(" and name in self.names:
            self.begin_call(name)
            self._raw = self._written = ""
            self._keywords, self._nesting = set(), Nesting("\"'")
            self._state = "argument"
        elif len(self._written) < MAX_NAME_CHARS and (char.isspace() or KEYWORD.fullmatch(name + char)):
            self._written += char
            self._raw += char
        else:
            self._give_up(char)

    def _step_argument(self, char: str) -> None:
        nesting = self._nesting
        if char not in ",)" or nesting.in_string or nesting.depth:
            nesting.feed(char)
            self._written += char
            return
        keyword, _, literal = (text.strip() for text in self._written.partition("="))
        if keyword or char == ",":
            try:
                value = json.dumps(literal_of(literal), ensure_ascii=False, allow_nan=False)
                value.encode()
            except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                value = ""
            if not value or not KEYWORD.fullmatch(keyword) or keyword in self._keywords:
                self.end_call(whole=False)
                self._give_up(self._written.lstrip() + char)
                return
            self.add_arguments(", " if self._keywords else "{")
            self.add_arguments(f"{json.dumps(keyword, ensure_ascii=False)}: {value}")
            self._keywords.add(keyword)
        self._written = ""
        if char == ")":
            self.add_arguments("}" if self._keywords else "{}")
            self.end_call(whole=True)
            self._state = "after"

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
