"""The answers of /v1/messages, whole and streamed, in Anthropic's form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from server.choice import TokenRecord
from server.errors import APIError
from server.generation import Generation
from server.replies.blocks import Block, BlockWriter, Event
from server.replies.head import usage_of

_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class MessageWriter(BlockWriter):
    def __init__(self, message_id: str, work: Generation, model: str, request_id: str) -> None:
        super().__init__(work)
        self._id = message_id
        self._model = model
        self._request_id = request_id

    def body(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [self._content(block) for block in self.blocks],
            **self._ending(),
            "usage": self._usage(),
        }

    def begun(self) -> Iterator[Event]:
        yield {"type": "message_start", "message": self.body()}

    def opened(self, block: Block) -> Iterator[Event]:
        yield {"type": "content_block_start", "index": block.index, "content_block": self._content(block)}

    def added(self, block: Block, text: str, records: list[TokenRecord]) -> Event:
        kind, name = _DELTAS[block.kind]
        return {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: text}}

    def closed(self, block: Block) -> Iterator[Event]:
        yield {"type": "content_block_stop", "index": block.index}

    def ended(self) -> Iterator[Event]:
        yield {"type": "message_delta", "delta": self._ending(), "usage": self._usage()}
        yield {"type": "message_stop"}

    def error(self, error: APIError) -> bytes:
        return b"event: error\ndata: " + error.anthropic_body(self._request_id) + b"\n\n"

    def _content(self, block: Block) -> dict[str, Any]:
        if block.kind == "text":
            return {"type": "text", "text": block.text}
        if block.kind == "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        arguments = {} if block.open else _object(block.text)
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}

    def _ending(self) -> dict[str, Any]:
        reason = {None: None, "length": "max_tokens"}.get(self.finish_reason, "end_turn")
        stop = self.stop if isinstance(self.stop, str) else None
        if stop is not None:
            reason = "stop_sequence"
        elif reason == "end_turn" and any(block.kind == "call" for block in self.blocks):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _usage(self) -> dict[str, Any]:
        """Tokens found in the cache are counted apart from the others."""
        assert self.work is not None
        used = usage_of(self.work)
        cached = used["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": used["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": used["completion_tokens"],
        }


def _object(text: str) -> Any:
    """A call's arguments; what was cut is not JSON and shown as it is."""
    try:
        return orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return {"_incomplete": text}
