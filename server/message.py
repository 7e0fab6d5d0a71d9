"""An answer as a message: what is thought, said and called, from the text of one choice.

What a model thinks before it answers stands between `<think>` and `</think>`. Templates differ in who writes the
opening mark: some end the prompt with it, then the answer begins inside. Blanks around the marks belong to neither.

One parser per choice, fed by it token by token. The text is taken character by character, so what comes out depends on
it alone.
"""

from __future__ import annotations

from typing import Literal

from server.stops import StopMatcher
from server.tools.parts import CallParser, Part, joined

OPENING, CLOSING = "<think>", "</think>"

Start = Literal["inside", "perhaps", "outside"]


def start_of(prompt_end: str) -> Start:
    """How an answer begins, by the text of its prompt behind the last control token."""
    opened, closed = prompt_end.rfind(OPENING), prompt_end.rfind(CLOSING)
    if opened > closed:
        return "inside"
    return "outside" if closed >= 0 else "perhaps"


class ReasoningSplitter:
    """For one answer. `thinking` says whether the text so far ends inside the thoughts."""

    def __init__(self, start: Start) -> None:
        self.thinking = start == "inside"
        self._state: Literal["undecided", "before", "thoughts", "behind", "answer"] = {
            "inside": "before",
            "perhaps": "undecided",
            "outside": "answer",
        }[start]  # type: ignore[assignment]
        self._held = ""  # what may be the opening mark, or blanks that may turn out to be around one
        self._matcher = StopMatcher((CLOSING,))

    def feed(self, text: str) -> tuple[str, str]:
        """Add text; returns what is certain: thoughts, and the text of the answer."""
        thoughts, answer = "", ""
        for place, char in enumerate(text):
            if self._state == "answer":
                return thoughts, answer + text[place:]
            thought, said = self._step(char)
            thoughts, answer = thoughts + thought, answer + said
        return thoughts, answer

    def finish(self) -> tuple[str, str]:
        """What was held back, when no more will come."""
        held, self._held = self._held, ""
        if self._state == "thoughts":
            return (held + self._matcher.finish()).rstrip(), ""
        return "", held if self._state == "undecided" else ""

    def _step(self, char: str) -> tuple[str, str]:
        if self._state == "undecided":
            self._held += char
            seen = self._held.lstrip()
            if seen == OPENING:
                self._held, self._state, self.thinking = "", "before", True
            elif not OPENING.startswith(seen):
                held, self._held, self._state = self._held, "", "answer"
                return "", held
        elif self._state == "behind":
            if not char.isspace():
                self._state = "answer"
                return "", char
        elif self._state == "thoughts" or not char.isspace():
            self._state = "thoughts"
            found = self._matcher.feed(char)
            text = self._held + found.text
            kept = text.rstrip()
            self._held = text[len(kept) :]
            if found.stop is not None:
                self._held, self._state, self.thinking = "", "behind", False
            return kept, ""
        return "", ""


class MessageParser:
    """Thoughts are told from the rest first, then calls from the rest of that."""

    def __init__(
        self, reasoning: ReasoningSplitter | None, calls: CallParser | None, *, show_reasoning: bool, named: bool
    ) -> None:
        """`show_reasoning` False drops the thoughts. `named`: the client named the function to be called."""
        self._reasoning = reasoning
        self._calls = calls
        self._show_reasoning = show_reasoning
        self._named = named

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends within a thought."""
        return self._reasoning is not None and self._reasoning.thinking

    def feed(self, text: str) -> list[Part]:
        """Add text; what became certain, in order."""
        thoughts, said = ("", text) if self._reasoning is None else self._reasoning.feed(text)
        return self._parts(thoughts, [Part("text", said)] if self._calls is None else self._calls.feed(said))

    def finish(self) -> list[Part]:
        """What was held back, when no more will come."""
        thoughts, said = ("", "") if self._reasoning is None else self._reasoning.finish()
        if self._calls is None:
            return self._parts(thoughts, [Part("text", said)])
        return self._parts(thoughts, [*self._calls.feed(said), *self._calls.finish()])

    def reason(self, reason: str | None) -> str | None:
        """How the answer ended, in OpenAI's words: "tool_calls" when calls were made, all of them whole, of the model's
        own choosing; a named call that is whole is a "stop"."""
        calls = self._calls
        made = calls is not None and calls.calls > 0 and calls.complete == calls.calls
        return "tool_calls" if reason == "stop" and made and not self._named else reason

    def _parts(self, thoughts: str, rest: list[Part]) -> list[Part]:
        shown = [Part("reasoning", thoughts)] if self._show_reasoning else []
        return joined([*shown, *rest])
