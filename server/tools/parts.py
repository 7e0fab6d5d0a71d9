"""What an answer is made of: text, thoughts and calls, in order; and what the parsers that find calls in it share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import suppress
from typing import Literal, NamedTuple, TypeVar

T = TypeVar("T")

MAX_NAME_CHARS = 256

Reading = Generator[None, str, T]
Kind = Literal["text", "reasoning", "call"]


class Part(NamedTuple):
    """A piece of an answer. A call begins with the part that has its name; what follows adds to its arguments."""

    kind: Kind
    text: str  # of a call: JSON text of its arguments
    call_id: str = ""
    name: str = ""


def joined(parts: Iterable[Part]) -> list[Part]:
    """The same in as few parts as can be, none of them empty but a call without arguments so far."""
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        if last is not None and last.kind == part.kind and not part.name:
            result[-1] = last._replace(text=last.text + part.text)
        elif part.text or part.name:
            result.append(part)
    return result


class CallParser(ABC):
    """Finds calls in the text of one answer and leaves the rest as it is.

    The text is taken character by character, so what comes out depends on the text alone, never on how it was cut. A
    call is one of the functions in `names` with a JSON object for arguments; whatever only looks like a call stays
    text. Once its arguments have begun a call is let out as it comes: if it breaks off, it ends there, and what follows
    is text. Blanks at the beginning of an answer and behind calls are dropped where a call follows, or nothing.
    """

    def __init__(self, names: Collection[str], new_id: Callable[[], str]) -> None:
        self.names = frozenset(names)
        self.calls = 0
        self.complete = 0  # calls whose arguments are whole
        self._new_id = new_id
        self._parts: list[Part] = []
        self._blanks = ""  # held back
        self._at_edge = True  # at the beginning or behind a call
        self._reading = self.read()
        next(self._reading)

    @abstractmethod
    def read(self) -> Reading[None]:
        """Is sent the text character by character, and at its end an empty one."""

    def feed(self, text: str) -> list[Part]:
        """Add text; what became certain."""
        for char in text:
            self._reading.send(char)
        return self._taken()

    def finish(self) -> list[Part]:
        """What was held back, when no more will come."""
        with suppress(StopIteration):
            self._reading.send("")
        if not self.calls:
            self._parts.append(Part("text", self._blanks))
        return self._taken()

    def say(self, text: str) -> None:
        for char in text:
            if self._at_edge and char.isspace():
                self._blanks += char
            else:
                self._parts.append(Part("text", self._blanks + char))
                self._blanks, self._at_edge = "", False

    def begin_call(self, name: str) -> None:
        self.calls += 1
        self._blanks = ""
        self._parts.append(Part("call", "", self._new_id(), name))

    def add_arguments(self, text: str) -> None:
        self._parts.append(Part("call", text))

    def end_call(self, *, whole: bool) -> None:
        self.complete += whole
        self._at_edge = True

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return joined(parts)


class Nesting:
    """How deep in brackets a text is, and whether in a string, followed character by character.

    `quotes` are the characters that strings begin and end with; a backslash in one takes the next for a letter.
    """

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
