"""What a model thinks before it answers, told from the answer: the text between `<think>` and `</think>`.

Templates differ in who writes the opening mark: some end the prompt with it, then the answer begins inside. Blanks
around the marks belong to neither. The text is taken character by character, so what comes out depends on it alone.
"""

from __future__ import annotations

from typing import Literal

from server.stops import StopMatcher

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
        match self._state:
            case "undecided":
                return self._step_undecided(char)
            case "before" if not char.isspace():
                self._state = "thoughts"
                return self._step_thoughts(char)
            case "thoughts":
                return self._step_thoughts(char)
            case "behind" if not char.isspace():
                self._state = "answer"
                return "", char
        return "", ""

    def _step_undecided(self, char: str) -> tuple[str, str]:
        self._held += char
        seen = self._held.lstrip()
        if seen == OPENING:
            self._held, self._state, self.thinking = "", "before", True
        elif not OPENING.startswith(seen):
            self._state = "answer"
            held, self._held = self._held, ""
            return "", held
        return "", ""

    def _step_thoughts(self, char: str) -> tuple[str, str]:
        found = self._matcher.feed(char)
        text = self._held + found.text
        kept = text.rstrip()
        if found.stop is not None:
            self._held, self._state, self.thinking = "", "behind", False
            return kept, ""
        self._held = text[len(kept) :]
        return kept, ""
