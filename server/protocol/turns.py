"""Chat messages put together from the smaller pieces that other APIs have: texts, thoughts, calls and their results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class Turns:
    """A conversation in the making. What an assistant thinks, says and calls in a row is one turn."""

    def __init__(self, history: Iterable[dict[str, Any]] = ()) -> None:
        self.messages: list[dict[str, Any]] = list(history)
        self._growing: dict[str, Any] = {}

    def say(self, role: str, text: str | None) -> None:
        if role == "assistant":
            self._assistant("content", "tool_calls")["content"] = text
        else:
            self.messages.append({"role": role, "content": text})

    def think(self, text: str) -> None:
        self._assistant("reasoning_content", "content", "tool_calls")["reasoning_content"] = text

    def call(self, call_id: str | None, name: str | None, arguments: Mapping[str, Any] | None) -> None:
        function = {"name": name, "arguments": arguments}
        calls = self._assistant().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str | None, text: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _assistant(self, *taken: str) -> dict[str, Any]:
        """The assistant's turn that is last and has none of these yet, or a new one."""
        turn = self._growing
        if not self.messages or self.messages[-1] is not turn or not turn.keys().isdisjoint(taken):
            turn = self._growing = {"role": "assistant"}
            self.messages.append(turn)
        return turn
