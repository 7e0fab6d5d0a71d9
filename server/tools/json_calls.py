"""Calls written as JSON between marks, in the three ways models do.

Hermes and Qwen   <tool_call>{"name": "f", "arguments": {}}</tool_call>, one after the other
Llama 3           {"name": "f", "parameters": {}}; {...}, at the beginning of an answer or behind <|python_tag|>
Mistral           [TOOL_CALLS][{"name": "f", "arguments": {}}, {...}], or [TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]...

A list is taken wherever an object is. The closing mark may be missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any, Literal

import orjson

from server.stops import StopMatcher
from server.tools.parts import CallParser, Nesting

ARGS = "[ARGS]"
MAX_NAME_CHARS = 256

_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*\{', re.DOTALL)

State = Literal["text", "opened", "name", "call", "between"]
Outcome = Literal["open", "whole", "failed"]


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
        super().__init__(names, new_id)
        self._opening, self._closing, self._separator, self._named = opening, closing, separator, named
        self._matcher = self._marks()
        self._state: State = "opened" if bare else "text"
        self._raw = ""  # what has to be text if no call comes of it
        self._in_list = False
        self._reader: CallReader | None = None

    def step(self, char: str) -> None:
        match self._state:
            case "text":
                found = self._matcher.feed(char)
                self.say(found.text)
                if found.stop == self._opening:
                    self._state, self._raw, self._in_list = "opened", found.stop, False
                elif found.stop is not None:
                    self._matcher = self._marks()
                    if self._behind_call:
                        self._blanks = ""
                    else:
                        self.say(found.stop)
            case "opened":
                self._step_opened(char)
            case "name":
                self._step_name(char)
            case "call":
                self._step_call(char)
            case "between":
                self._step_between(char)

    def end(self) -> None:
        match self._state:
            case "text":
                rest = self._matcher.finish()
                if not (self._behind_call and self._closing.startswith(rest)):
                    self.say(rest)
            case "call":
                if self._reader is not None and self._reader.begun:
                    self.end_call(whole=False)
                elif self._reader is not None:
                    self.say(self._raw + self._reader.text)
            case "opened" | "name" | "between":
                self.say(self._raw)

    @property
    def _behind_call(self) -> bool:
        """Whether nothing but blanks has come since a call."""
        return self._at_edge and self.calls > 0

    def _marks(self) -> StopMatcher:
        return StopMatcher((self._opening, self._closing) if self._closing else (self._opening,))

    def _back_to_text(self) -> None:
        raw, self._raw = self._raw, ""
        self._state, self._matcher = "text", self._marks()
        self.say(raw)

    def _give_up(self, char: str) -> None:
        """What was taken for a call is text."""
        self._back_to_text()
        self.step(char)

    def _step_opened(self, char: str) -> None:
        if char == "{":
            self._reader = CallReader(self)
            self._state = "call"
            self._step_call(char)
        elif char == "[" and not self._in_list and self._raw.strip() in ("", self._opening):
            self._in_list = True
            self._raw += char
        elif char.isspace():
            self._raw += char
        elif self._named and not self._in_list and self._raw.startswith(self._opening):
            self._state = "name"
            self._step_name(char)
        else:
            self._give_up(char)

    def _step_name(self, char: str) -> None:
        written = self._raw.removeprefix(self._opening).strip()
        if char != "{":
            if len(written) < MAX_NAME_CHARS + len(ARGS):
                self._raw += char
            else:
                self._give_up(char)
            return
        name = written.removesuffix(ARGS).strip()
        if name not in self.names:
            self._give_up(char)
            return
        self._reader = CallReader(self, name)
        self._state = "call"
        self._step_call(char)

    def _step_call(self, char: str) -> None:
        assert self._reader is not None
        outcome = self._reader.feed(char)
        if outcome == "failed":
            self._raw = "" if self._reader.begun else self._raw + self._reader.text
            self._give_up(char)
        elif outcome == "whole":
            self._raw = ""
            self._state = "between"
            if not (self._in_list or self._separator):
                self._back_to_text()

    def _step_between(self, char: str) -> None:
        if char.isspace():
            self._raw += char
        elif char == ("," if self._in_list else self._separator):
            self._raw += char
            self._state = "opened"
        elif char == "]" and self._in_list:
            self._raw = ""
            self._back_to_text()
        else:
            self._give_up(char)


class CallReader:
    """Reads one call written as an object, and tells `parser` of it as soon as it is sure to be one: when its name is
    known and its arguments begin. A call with other keys before them, or whose arguments are a string of JSON, is known
    by its end only.

    `text` is what was read of it until then. With `name`, only the arguments are in the text.
    """

    def __init__(self, parser: CallParser, name: str | None = None) -> None:
        self.text = ""
        self.begun = name is not None
        self._parser = parser
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
            if name not in self._parser.names:
                return "failed"
            self._begin(name)
            self._add(char)
        self.text += char
        return "open"

    def _whole(self, text: str) -> Outcome:
        """The object has ended, and was not known for a call before."""
        call = _json(text)
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or name not in self._parser.names:
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
