"""One JSON value, followed character by character, so that what is not JSON is noticed where it stops being so.

Strict as RFC 8259 is. Knows nothing of what the value means.
"""

from __future__ import annotations

_BLANKS = " \t\n\r"
_LITERALS = {"t": "true", "f": "false", "n": "null"}
# States of a number and where each character class leads; those in _WHOLE may end it.
_NUMBER = {
    "minus": {"0": "zero", "1-9": "digits"},
    "zero": {".": "point", "e": "exponent"},
    "digits": {"0": "digits", "1-9": "digits", ".": "point", "e": "exponent"},
    "point": {"0": "fraction", "1-9": "fraction"},
    "fraction": {"0": "fraction", "1-9": "fraction", "e": "exponent"},
    "exponent": {"+-": "sign", "0": "power", "1-9": "power"},
    "sign": {"0": "power", "1-9": "power"},
    "power": {"0": "power", "1-9": "power"},
}
_WHOLE = {"zero", "digits", "fraction", "power"}


class JsonScanner:
    """`state` is "done" when the value is whole. A number at the top is never known to be."""

    __slots__ = ("_left", "in_key", "stack", "state")

    def __init__(self) -> None:
        self.state = "value"
        self.stack: list[str] = []  # the closing brackets that are owed
        self.in_key = False
        self._left = ""  # of a literal, or a hexadecimal digit for each owed to \\u

    @property
    def in_number(self) -> bool:
        return self.state in _NUMBER

    def feed(self, char: str) -> bool:
        """Take the next character; False when no JSON goes on with it. Then the scanner must not be fed again."""
        state = self.state
        if state == "string":
            return self._string(char)
        if state in _NUMBER:
            following = _NUMBER[state].get(_class_of(char))
            if following is not None:
                self.state = following
                return True
            if state not in _WHOLE or not self.stack:
                return False
            self._value_ended()
            return self.feed(char)
        if state in ("literal", "escape", "hex"):
            return self._inside(char)
        if char in _BLANKS:
            return state != "done"
        return self._structure(char)

    def _string(self, char: str) -> bool:
        if char == '"':
            if self.in_key:
                self.in_key, self.state = False, "colon"
            else:
                self._value_ended()
        elif char == "\\":
            self.state = "escape"
        return char >= " "

    def _inside(self, char: str) -> bool:
        """A literal or an escape goes on."""
        if self.state == "escape":
            self.state = "hex" if char == "u" else "string"
            self._left = "xxxx"
            return char in '"\\/bfnrtu'
        if self.state == "hex":
            allowed = char in "0123456789abcdefABCDEF"
            self._left = self._left[1:]
            if not self._left:
                self.state = "string"
            return allowed
        allowed, self._left = char == self._left[0], self._left[1:]
        if not self._left:
            self._value_ended()
        return allowed

    def _structure(self, char: str) -> bool:
        state = self.state
        if state == "colon" and char == ":":
            self.state = "value"
        elif state in ("key", "first key") and char == '"':
            self.in_key, self.state = True, "string"
        elif state in ("after", "first key", "first item") and self.stack and char == self.stack[-1]:
            self.stack.pop()
            self._value_ended()
        elif state == "after" and char == ",":
            self.state = "key" if self.stack[-1] == "}" else "value"
        elif state in ("value", "first item"):
            return self._value(char)
        else:
            return False
        return True

    def _value(self, char: str) -> bool:
        if char in "{[":
            self.stack.append("}" if char == "{" else "]")
            self.state = "first key" if char == "{" else "first item"
        elif char == '"':
            self.state = "string"
        elif char in _LITERALS:
            self.state, self._left = "literal", _LITERALS[char][1:]
        elif char == "-":
            self.state = "minus"
        else:
            self.state = {"0": "zero", "1-9": "digits"}.get(_class_of(char), "")
        return self.state != ""

    def _value_ended(self) -> None:
        self.state = "after" if self.stack else "done"


def _class_of(char: str) -> str:
    if char in "123456789":
        return "1-9"
    if char in "eE":
        return "e"
    return "+-" if char in "+-" else char
