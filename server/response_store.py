"""The responses that may be asked for again, in memory: so many, and so many bytes of them, the oldest forgotten first.

Owned by the event loop. Each belongs to the API key that made it; for others it does not exist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from server.errors import InvalidRequest, NotFound, shown
from server.replies.response import ResponseWriter

MAX_RESPONSES = 1000
MAX_BYTES = 64 << 20


@dataclass(slots=True)
class Stored:
    """A response and the conversation that it answers, without instructions."""

    response: ResponseWriter
    messages: list[dict[str, Any]]
    owner: str
    size_bytes: int = 0


class ResponseStore:
    """`owner` says whose the request being answered is."""

    def __init__(
        self, owner: Callable[[], str], max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES
    ) -> None:
        self._owner = owner
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: dict[str, Stored] = {}
        self._bytes = 0

    def put(self, response: ResponseWriter, messages: list[dict[str, Any]]) -> None:
        """Keep a response as it is now, in place of what it was."""
        self._drop(response.id)
        size = len(orjson.dumps(messages)) + len(orjson.dumps(response.body()))
        self._stored[response.id] = Stored(response, messages, self._owner(), size)
        self._bytes += size
        while len(self._stored) > self._max_responses or self._bytes > self._max_bytes:
            self._drop(next(iter(self._stored)))

    def get(self, response_id: str) -> ResponseWriter:
        return self._find(response_id, "response_id").response

    def delete(self, response_id: str) -> None:
        self._find(response_id, "response_id")
        self._drop(response_id)

    def conversation(self, response_id: str) -> list[dict[str, Any]]:
        """What a following request goes on from. Raises InvalidRequest for a response without a whole answer."""
        stored = self._find(response_id, "previous_response_id")
        if stored.response.finish_reason is None:
            raise InvalidRequest(
                f"The response {shown(response_id)} is {stored.response.status}.", param="previous_response_id"
            )
        try:
            return stored.response.turns(stored.messages)
        except ValueError:
            message = f"The response {shown(response_id)} was cut within a call, which cannot be gone on from."
            raise InvalidRequest(message, param="previous_response_id") from None

    def _find(self, response_id: str, param: str) -> Stored:
        stored = self._stored.get(response_id)
        if stored is None or stored.owner != self._owner():
            raise NotFound(f"There is no response with the id {shown(response_id)} (any more).", param=param)
        return stored

    def _drop(self, response_id: str) -> None:
        if (stored := self._stored.pop(response_id, None)) is not None:
            self._bytes -= stored.size_bytes
