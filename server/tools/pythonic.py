"""Calls written as a Python list, `[f(city="Paris", days=3), g()]`, which is the whole answer or its beginning.

Arguments are literals by keyword, in Python's spelling or in JSON's (True or true). Each is let out as JSON when it is
whole.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

from server.tools.parts import MAX_NAME_CHARS, CallParser, Nesting, Reading

KEYWORD = re.compile(r"[\w.-]+")
_NAMES = {"true": True, "false": False, "null": None}


class PythonicCalls(CallParser):
    def read(self) -> Reading[None]:
        raw = ""
        while (char := (yield)).isspace():
            raw += char
        self.say((yield from self._calls(raw + char)) if char == "[" else raw + char)
        while char := (yield):
            self.say(char)

    def _calls(self, raw: str) -> Reading[str]:
        """The list behind its bracket; what is text behind it. `raw` has to be text if no call comes of it."""
        while True:
            written = ""
            while (char := (yield)) != "(" or written.strip() not in self.names:
                known = char.isspace() or KEYWORD.fullmatch(written.strip() + char)
                if not char or not known or len(written) >= MAX_NAME_CHARS:
                    return raw + written + char
                written += char
            self.begin_call(written.strip())
            rest = yield from self._arguments()
            if rest is not None:
                return rest
            raw = ""
            while (char := (yield)).isspace():
                raw += char
            if char != ",":
                return "" if char == "]" else raw + char
            raw += char

    def _arguments(self) -> Reading[str | None]:
        """Up to the closing bracket; what is text where they break off."""
        written, keywords, nesting = "", set[str](), Nesting("\"'")
        while char := (yield):
            if char not in ",)" or nesting.in_string or nesting.depth:
                nesting.feed(char)
                written += char
                continue
            keyword, _, literal = (text.strip() for text in written.partition("="))
            if keyword or char == ",":
                try:
                    value = json.dumps(literal_of(literal), ensure_ascii=False, allow_nan=False)
                    value.encode()
                except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                    value = ""
                if not value or not KEYWORD.fullmatch(keyword) or keyword in keywords:
                    self.end_call(whole=False)
                    return written.lstrip() + char
                self.add_arguments(", " if keywords else "{")
                self.add_arguments(f"{json.dumps(keyword, ensure_ascii=False)}: {value}")
                keywords.add(keyword)
            written = ""
            if char == ")":
                self.add_arguments("}" if keywords else "{}")
                self.end_call(whole=True)
                return None
        self.end_call(whole=False)
        return ""


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
