"""How deep in brackets a text is, and whether in a string, followed character by character."""

from __future__ import annotations


class Nesting:
    """`quotes` are the characters that strings begin and end with; a backslash in one takes the next for a letter."""

    __slots__ = ("_escaped", "_quote", "_quotes", "depth")

    def __init__(self, quotes: str = '"') -> None:
        self.depth = 0
        self._quotes = quotes
        self._quote = ""  # around the string that is open
        self._escaped = False

    @property
    def in_string(self) -> bool:
        return self._quote != ""

    def feed(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._quote:
            self._escaped = char == "\\"
            if char == self._quote:
                self._quote = ""
        elif char in self._quotes:
            self._quote = char
        elif char in "([{":
            self.depth += 1
        elif char in ")]}":
            self.depth -= 1
