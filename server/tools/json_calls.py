"""Calls written as JSON between marks, in the three ways models do.

Hermes and Qwen   <tool_call>{"name": "f", "arguments": {}}</tool_call>, one after the other
Llama 3           {"name": "f", "parameters": {}}; {...}, at the beginning of an answer or behind <|python_tag|>
Mistral           [TOOL_CALLS][{"name": "f", "arguments": {}}, {...}], or [TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]...

A list is taken wherever an object is. The closing mark may be missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

import orjson

from server.stops import StopMatcher
from server.tools.parts import MAX_NAME_CHARS, CallParser, Nesting, Reading

ARGS = "[ARGS]"

_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*\{', re.DOTALL)


class JsonCalls(CallParser):
    """Configured by how its calls are marked."""

    def __init__(
        self,
        names: Collection[str],
        new_id: Callable[[], str],
        *,
        opening: str,
        closing: str = "",
        bare: bool = False,
        separator: str = "",
        named: bool = False,
    ) -> None:
        """`bare`: an answer may begin with a call, unmarked. `separator` stands between calls outside lists. `named`: a
        name may come before its arguments, outside the JSON."""
        self._opening, self._closing, self._separator = opening, closing, separator
        self._bare, self._named = bare, named
        super().__init__(names, new_id)

    def read(self) -> Reading[None]:
        char: str | None = None
        if self._bare:
            char = yield from self._calls("")
        while char != "":
            char = yield from self._text(char)
            if char is None:
                char = yield from self._calls(self._opening)

    def _text(self, char: str | None) -> Reading[str | None]:
        """Text up to an opening mark, and None; or to the end, and ""."""
        marks = [mark for mark in (self._opening, self._closing) if mark]
        matcher = StopMatcher(tuple(marks))
        while char := (yield) if char is None else char:  # the end is an empty one
            found, char = matcher.feed(char), None
            self.say(found.text)
            if found.stop == self._opening:
                return None
            if found.stop is not None:
                matcher = StopMatcher(tuple(marks))
                if self._behind_call:
                    self._blanks = ""
                else:
                    self.say(found.stop)
        rest = matcher.finish()
        if not (self._behind_call and self._closing.startswith(rest)):
            self.say(rest)
        return ""

    @property
    def _behind_call(self) -> bool:
        """Whether nothing but blanks has come since a call."""
        return self._at_edge and self.calls > 0

    def _calls(self, raw: str) -> Reading[str | None]:
        """Calls one after the other, and the character behind them, None where it is not known yet.

        `raw` is what has to be text if no call comes of it.
        """
        in_list = False
        while True:
            char, name = (yield), None
            while char.isspace() or (char == "[" and not in_list and raw.strip() in ("", self._opening)):
                in_list = in_list or char == "["
                raw += char
                char = yield
            if self._named and not in_list and char != "{" and raw.startswith(self._opening):
                written = ""
                while char not in ("{", "") and len(written.rstrip()) < MAX_NAME_CHARS + len(ARGS):
                    written += char
                    char = yield
                raw += written
                name = written.rstrip().removesuffix(ARGS).strip()
            if char != "{" or not (name is None or name in self.names):
                self.say(raw)
                return char
            whole, char_behind = yield from self._call(raw, char, name)
            raw = ""
            if not whole or not (in_list or self._separator):
                return char_behind
            while (char := (yield)).isspace():
                raw += char
            if char == "]" and in_list:
                return None
            if char != ("," if in_list else self._separator):
                self.say(raw)
                return char
            raw += char

    def _call(self, raw: str, char: str, name: str | None) -> Reading[tuple[bool, str | None]]:
        """One call written as an object that begins with `char`; whether it is whole, and the character behind one that
        is not. With `name`, only the arguments are in the object.

        It is let out as soon as it is sure to be one: when its name is known and its arguments begin. A call with other
        keys before them, or whose arguments are a string of JSON, is known by its end only.
        """
        nesting, text = Nesting(), ""
        nesting.feed(char)
        level = 0 if name else 1  # brackets around the arguments
        while name is None:
            if not nesting.depth and self._add_whole(text + char):
                return True, None
            head = _HEAD.fullmatch(text + char) if char == "{" else None
            name = None if head is None else _json(head[1])
            if not char or not nesting.depth or (head is not None and name not in self.names):
                self.say(raw + text)
                return False, char
            if name is None:
                text += char
                char = yield
                nesting.feed(char)
        self.begin_call(name)
        arguments = char
        self.add_arguments(char)
        while nesting.depth > level:
            char = yield
            if not char:
                self.end_call(whole=False)
                return False, char
            nesting.feed(char)
            arguments += char
            self.add_arguments(char)
        whole, others = isinstance(_json(arguments), dict), False
        while nesting.depth:
            char = yield
            nesting.feed(char)
            others = others or char == ","
            if not char or not (others or char.isspace() or nesting.depth == 0):
                self.end_call(whole=whole and char != "")
                return False, char
        self.end_call(whole=whole)
        return True, None

    def _add_whole(self, text: str) -> bool:
        """Let out an object that has ended, if it is a call."""
        call = _json(text)
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or name not in self.names:
            return False
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, dict):
            arguments = orjson.dumps(arguments).decode()
        arguments = arguments or "{}"
        if not isinstance(arguments, str) or not isinstance(_json(arguments), dict):
            return False
        self.begin_call(name)
        self.add_arguments(arguments)
        self.end_call(whole=True)
        return True


def _json(text: str) -> Any:
    """Its value; None for what is not JSON."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
