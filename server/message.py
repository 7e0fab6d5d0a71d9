"""An answer as a message: what is thought, said and called, from the text of one choice.

One per choice, fed by it token by token. Depends on the text alone.
"""

from __future__ import annotations

from server.reasoning import ReasoningSplitter
from server.tools.parts import CallParser, Part, joined


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
