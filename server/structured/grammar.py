"""A grammar that an answer must follow, as llguidance's Lark dialect, and the pieces it is put together from.

Pure text: nothing here knows a request or compiles anything. JSON is written with at most one blank, or one line break
and its indentation, between two tokens, so that no model can be stuck in blanks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

# At most twelve characters between two tokens of JSON.
WHITESPACE = r" ?|\n[ \t]{0,11}"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must be: `start` is the right side of the first rule, `rules` are the others.

    With `foreign`, a whole grammar in the client's own words, Lark or GBNF, `rules` end where it is to be put in
    braces; without a start it is everything. `field` is where the client gave it, for messages.
    """

    start: str
    field: str
    rules: str = ""
    foreign: str | None = None

    @property
    def text(self) -> str:
        """All but what is foreign."""
        return f"start: {self.start}\n{self.rules}" if self.start else ""

    @property
    def size_bytes(self) -> int:
        return len(self.text.encode()) + len((self.foreign or "").encode())

    def within(self, start: str, name: str, rules: str = "") -> Grammar:
        """A grammar in which this one is the rule `name`; `rules` are those that `start` needs besides."""
        own = "%lark " if not self.start else f"{self.start}\n{self.rules}"
        return Grammar(start, self.field, f"{rules}\n{name}: {own}", self.foreign)


def json_of(schema: Mapping[str, Any], whitespace: str | None = WHITESPACE) -> str:
    """JSON that follows a schema, for the right of a rule. `whitespace` is a regular expression of what may stand
    between two tokens; None for nothing."""
    style = {"whitespace_flexible": False} if whitespace is None else {"whitespace_pattern": whitespace}
    return "%json " + orjson.dumps({**schema, "x-guidance": style}).decode()


def literal(text: str) -> str:
    """`text` itself, for the right of a rule. JSON's strings are a subset of Lark's."""
    return orjson.dumps(text).decode()


def one_of(texts: Iterable[str]) -> str:
    """One of the texts, for the right of a rule."""
    return " | ".join(map(literal, texts))


def regex(pattern: str) -> str:
    """Text that a regular expression matches as a whole, for the right of a rule."""
    written, escaped = [], False
    for char in pattern:
        if char == "\n":
            written.append("n" if escaped else "\\n")
        else:
            written.append("\\/" if char == "/" and not escaped else char)
        escaped = char == "\\" and not escaped
    return "/" + "".join(written) + "/"
