"""Server-sent events, put together from bytes; and what every writer of answers is.

A chunk is the same for every token of a choice but for its text, so all else is made once per request. Only chunks that
carry logprobs or token ids are built as dictionaries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import orjson

from server.choice import Choice, Delta
from server.errors import APIError
from server.generation import Generation
from server.protocol.fields import StreamOptions
from server.replies.head import Head, usage_of

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"


class AnswerWriter(Protocol):
    """Turns deltas into events, or into one whole answer. One per answer."""

    def events(self, generation: Generation, choice: Choice, delta: Delta, /) -> bytes: ...

    def end(self, generation: Generation, /) -> bytes: ...

    def error(self, error: APIError, /) -> bytes: ...

    def whole(self, generation: Generation, answers: Sequence[Delta], /) -> bytes: ...


class ChunkWriter(ABC):
    """The events that OpenAI's older APIs have in common."""

    def __init__(
        self, head: Head, kind: str, options: StreamOptions | None, extra: Mapping[str, Any] | None = None
    ) -> None:
        self._head = head
        fields = orjson.dumps({**head.fields(kind), **(extra or {})})
        self._opening = b"data: " + fields[:-1] + b',"choices":['
        self._usage_at_end = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._plain_closing = b'],"usage":null}\n\n' if self._usage_at_end else b"]}\n\n"

    @abstractmethod
    def choices(self, choice: Choice, delta: Delta) -> list[bytes]:
        """What a delta says, as JSON choice objects of one chunk each."""

    @abstractmethod
    def whole(self, generation: Generation, answers: Sequence[Delta]) -> bytes:
        """The answer that is not streamed."""

    def events(self, generation: Generation, choice: Choice, delta: Delta) -> bytes:
        """The events of a delta; nothing for one without anything to say."""
        bodies = self.choices(choice, delta)
        if not bodies:
            return b""
        closing = self._closing(generation)
        return b"".join([self._opening + body + closing for body in bodies])

    def end(self, generation: Generation) -> bytes:
        """What follows the last delta."""
        closing = self._head.closing(generation, usage=self._usage_at_end)
        return self._opening + b"]," + orjson.dumps(closing)[1:] + b"\n\n" + DONE if closing else DONE

    def error(self, error: APIError) -> bytes:
        """The last event of a stream that breaks."""
        return b"data: " + error.body() + b"\n\n"

    def _closing(self, generation: Generation) -> bytes:
        return (
            b'],"usage":' + orjson.dumps(usage_of(generation)) + b"}\n\n" if self._usage_always else self._plain_closing
        )
