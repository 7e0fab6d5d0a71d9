"""One call written as a JSON object, `{"name": ..., "arguments": {...}}`, read character by character."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Literal

from server.tools.json_scanner import JsonScanner
from server.tools.parts import CallParser

ARGUMENT_KEYS = ("arguments", "parameters")

Outcome = Literal["open", "whole", "failed"]


class CallReader:
    """Tells `parser` of a call as soon as it is sure to be one: its name is known and its arguments have begun.

    `text` is what was read of it until then. The keys may come in either order; others are passed over. Arguments that
    are written as a string of JSON are read all the same.
    """

    __slots__ = (
        "_arguments",
        "_buffer",
        "_key",
        "_name",
        "_names",
        "_parser",
        "_place",
        "_scanner",
        "_wrapped",
        "begun",
        "text",
    )

    def __init__(self, parser: CallParser, names: Collection[str]) -> None:
        self.text = ""
        self.begun = False
        self._parser = parser
        self._names = names
        self._scanner = JsonScanner()
        self._place: Literal["between", "key", "before value", "value"] = "between"
        self._key = ""
        self._buffer = ""  # the key or the value being read
        self._name: str | None = None
        self._arguments: str | None = None  # as far as they were read before the name was known
        self._wrapped = False  # whether the object around the arguments is not in the text

    @classmethod
    def of_arguments(cls, parser: CallParser, name: str) -> CallReader:
        """For a call whose name is known: only its arguments are to be fed."""
        reader = cls(parser, (name,))
        for char in '{"name":' + json.dumps(name) + ',"arguments":':
            reader.feed(char)
        reader.text = ""
        reader._wrapped = True
        return reader

    def feed(self, char: str) -> Outcome:
        """Take the next character. After a failure it is not part of `text`."""
        outcome = self._take(char)
        if outcome != "failed" and not self.begun:
            self.text += char
        return outcome

    def _take(self, char: str) -> Outcome:
        scanner = self._scanner
        number = scanner.in_number and len(scanner.stack) == 1
        if not scanner.feed(char):
            return self._failed()
        if number and not scanner.in_number:  # ended by a character that is not part of it
            if not self._value_read():
                return self._failed()
        elif self._place == "value":
            if not self._value_goes_on(char):
                return self._failed()
            if scanner.state == "after" and len(scanner.stack) == 1 and not self._value_read():
                return self._failed()
        elif self._place == "key":
            self._buffer += char
            if scanner.state == "colon":
                self._key, self._place = str(json.loads(self._buffer)), "before value"
        elif self._place == "before value" and scanner.state != "value":
            self._place, self._buffer = "value", ""
            if not self._value_goes_on(char):
                return self._failed()
        elif self._place == "between" and scanner.in_key:
            self._place, self._buffer = "key", char
        if self._wrapped and scanner.state == "after" and len(scanner.stack) == 1:
            self._wrapped = False
            return self._take("}")
        if scanner.state == "done":
            return self._whole()
        return "open"

    def _value_goes_on(self, char: str) -> bool:
        if self._key in ARGUMENT_KEYS and not self._buffer and self._arguments is not None:
            self._key = ""  # arguments were there before
        if self._key not in ARGUMENT_KEYS:
            self._buffer += char if self._key == "name" else ""
            return True
        if not self._buffer and char not in '{"n':
            return False
        self._buffer += char
        if self._buffer[0] == "{":
            self._arguments = (self._arguments or "") + char
            self._let_out()
        return True

    def _value_read(self) -> bool:
        self._place = "between"
        if self._key == "name" and self._name is None:
            name = json.loads(self._buffer)
            if not isinstance(name, str) or name not in self._names:
                return False
            self._name = name
            self._let_out()
        elif self._key in ARGUMENT_KEYS and self._buffer[0] != "{":
            written = json.loads(self._buffer) or "{}"
            if not is_object(written):
                return False
            self._arguments = written
            self._let_out()
        return True

    def _let_out(self) -> None:
        """Arguments that have not been let out yet; with the first of them, the call."""
        if self._name is None or self._arguments is None:
            return
        if not self.begun:
            self.begun = True
            self._parser.begin_call(self._name)
        self._parser.add_arguments(self._arguments)
        self._arguments = ""

    def _whole(self) -> Outcome:
        if self._name is None:
            return self._failed()
        if not self.begun:
            self._arguments = "{}"
            self._let_out()
        self._parser.end_call(whole=True)
        return "whole"

    def _failed(self) -> Outcome:
        if self.begun:
            self._parser.end_call(whole=False)
        return "failed"


def is_object(text: str) -> bool:
    """Whether a text is a JSON object that can be sent as UTF-8."""
    scanner = JsonScanner()
    return (
        text.lstrip().startswith("{")
        and not any("\ud800" <= char <= "\udfff" for char in text)
        and all(map(scanner.feed, text))
        and scanner.state == "done"
    )
