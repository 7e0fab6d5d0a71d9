"""An answer as a row of blocks, each opened, filled and closed before the next: what the responses API and Anthropic's
have in common.

The same writer makes streams and whole answers: a whole one is written from its only delta, and the events are not
sent. One per answer, which has one choice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from server.choice import Choice, Delta, TokenRecord
from server.errors import APIError
from server.generation import Generation
from server.replies.head import new_id
from server.tools.parts import Kind, Part

Event = dict[str, Any]


@dataclass(slots=True)
class Block:
    """Something said, something thought, or a call; then `texts` are its arguments."""

    kind: Kind
    index: int
    call_id: str = ""
    name: str = ""
    id: str = field(default_factory=lambda: new_id("item", "_"))
    texts: list[str] = field(default_factory=list)
    records: list[TokenRecord] = field(default_factory=list)
    open: bool = True

    @property
    def text(self) -> str:
        return "".join(self.texts)


class BlockWriter(ABC):
    """Turns deltas into events, and remembers the blocks."""

    def __init__(self, work: Generation) -> None:
        self.blocks: list[Block] = []
        self.finish_reason: str | None = None
        self.stop: str | int | None = None
        self.work: Generation | None = work  # until it is finished, for answers that are kept
        self._begun = False
        self._records: list[TokenRecord] = []  # whose text is held back

    def events(self, _: Choice, delta: Delta) -> bytes:
        """The events of a delta, as they are sent."""
        return b"".join([self.sent(event) for event in self._events(delta)])

    def sent(self, event: Event) -> bytes:
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event))

    def end(self) -> bytes:
        return b""

    def whole(self, answers: Sequence[Delta]) -> bytes:
        for _ in self._events(answers[0]):
            pass  # remembered, not sent
        return orjson.dumps(self.body())

    def _events(self, delta: Delta) -> Iterator[Event]:
        if not self._begun:
            self._begun = True
            yield from self.begun()
        for part, records in self._parts(delta):
            block = self.blocks[-1] if self.blocks else None
            if block is None or block.kind != part.kind or part.name:
                yield from self._close()
                block = yield from self._open(part)
            block.texts.append(part.text)
            block.records += records
            if part.text or records:
                yield self.added(block, part.text, records)
        if delta.finish_reason is not None:
            if not self.blocks:  # an answer of nothing is an empty text
                yield from self._open(Part("text", ""))
            self.finish_reason, self.stop = delta.finish_reason, delta.stop
            yield from self._close()
            yield from self.ended()

    def _parts(self, delta: Delta) -> Iterator[tuple[Part, list[TokenRecord]]]:
        """The parts of a delta. Logprobs go with the text that follows them, those of thoughts and calls nowhere."""
        if delta.parts is None:
            if delta.text or delta.records:
                yield Part("text", delta.text), delta.records
            return
        self._records += delta.records
        for part in delta.parts:
            yield part, self._records if part.kind == "text" else []
            self._records = []

    def _open(self, part: Part) -> Generator[Event, None, Block]:
        block = Block(part.kind, len(self.blocks), part.call_id, part.name)
        self.blocks.append(block)
        yield from self.opened(block)
        return block

    def _close(self) -> Iterator[Event]:
        if self.blocks and self.blocks[-1].open:
            self.blocks[-1].open = False
            yield from self.closed(self.blocks[-1])

    @abstractmethod
    def body(self) -> dict[str, Any]: ...

    @abstractmethod
    def begun(self) -> Iterator[Event]: ...

    @abstractmethod
    def opened(self, block: Block) -> Iterator[Event]: ...

    @abstractmethod
    def added(self, block: Block, text: str, records: list[TokenRecord]) -> Event: ...

    @abstractmethod
    def closed(self, block: Block) -> Iterator[Event]: ...

    @abstractmethod
    def ended(self) -> Iterator[Event]: ...

    @abstractmethod
    def error(self, error: APIError) -> bytes:
        """The last events of a stream that breaks."""
