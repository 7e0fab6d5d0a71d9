"""The answers of /v1/responses: the response object, and the events of its stream in the order OpenAI's clients expect.

response.created, response.in_progress
  response.output_item.added
    response.content_part.added, response.output_text.delta ..., response.output_text.done, response.content_part.done
    or response.function_call_arguments.delta ..., response.function_call_arguments.done
  response.output_item.done
response.completed, or response.incomplete when the answer was cut
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import orjson

from server.choice import TokenRecord
from server.errors import APIError
from server.generation import Generation
from server.protocol.chat import Turns
from server.protocol.responses import ResponseRequest
from server.replies.blocks import Block, BlockWriter, Event
from server.replies.head import usage_of
from server.replies.logprobs import LogprobShapes

# Fields that are sent back as they came, with what they are when they did not come.
_ECHOED: dict[str, Any] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "model": None,
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "store": True,
    "temperature": 1.0,
    "tool_choice": "auto",
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
}
_NAMES = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}


class ResponseWriter(BlockWriter):
    """One response. `keep` is called when it begins and when it ends, for whoever stores it."""

    def __init__(
        self,
        response_id: str,
        request: ResponseRequest,
        work: Generation,
        keep: Callable[[ResponseWriter], None],
    ) -> None:
        super().__init__(work)
        self.id = response_id
        self.failure: APIError | None = None
        self._request = request
        self._logprobs = LogprobShapes(work, request.top_logprobs or 0) if request.wants_logprobs else None
        self._keep = keep
        self._created = time.time()
        self._completed: float | None = None
        self._usage: dict[str, Any] | None = None
        self._sequence = 0

    @property
    def status(self) -> str:
        if self.failure is not None:
            return "failed"
        if self.finish_reason is not None:
            return "incomplete" if self.finish_reason == "length" else "completed"
        return "cancelled" if self.work is not None and self.work.gone else "in_progress"

    def body(self) -> dict[str, Any]:
        """The response object as it is now."""
        request, status = self._request, self.status
        echoed = {
            name: default if getattr(request, name) is None else getattr(request, name)
            for name, default in _ECHOED.items()
        }
        tools = [{"parameters": None, "strict": None, **tool} for tool in request.tools or ()]
        reasoning = request.reasoning
        return {
            "id": self.id,
            "object": "response",
            "created_at": int(self._created),
            "status": status,
            "completed_at": self._completed,
            "error": self.failure and {"code": "server_error", "message": self.failure.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            **echoed,
            "output": [self._item(block) for block in self.blocks],
            "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
            "service_tier": "default",
            "text": {"format": (request.text and request.text.format) or {"type": "text"}},
            "tools": tools,
            **({} if self._usage is None else {"usage": self._usage}),
            **({} if request.user is None else {"user": request.user}),
        }

    def input_items(self) -> list[dict[str, Any]]:
        """What was asked, without what `previous_response_id` brought."""
        name = self.id.removeprefix("resp_")
        return [item.listed(f"item_{name}_{number}") for number, item in enumerate(self._request.input)]

    def turns(self, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The conversation so far, with this answer, as chat messages. Raises ValueError for a call that was cut."""
        turns = Turns(before)
        for block in self.blocks:
            if block.kind == "call":
                turns.call(block.call_id, block.name, orjson.loads(block.text or "{}"))
            elif block.kind == "reasoning":
                turns.think(block.text)
            else:
                turns.say("assistant", block.text)
        return turns.messages

    def sent(self, event: Event) -> bytes:
        event["sequence_number"] = self._sequence
        self._sequence += 1
        return super().sent(event)

    def begun(self) -> Iterator[Event]:
        self._keep(self)
        for name in ("created", "in_progress"):
            yield {"type": f"response.{name}", "response": self.body()}

    def opened(self, block: Block) -> Iterator[Event]:
        item = self._item(block)
        if "content" in item:
            item["content"] = []
        yield {"type": "response.output_item.added", "output_index": block.index, "item": item}
        if block.kind != "call":
            yield {"type": "response.content_part.added", **self._place(block), "part": self._part(block)}

    def added(self, block: Block, text: str, records: list[TokenRecord]) -> Event:
        event = {"type": f"response.{_NAMES[block.kind]}.delta", **self._place(block), "delta": text}
        if block.kind == "text":
            event["logprobs"] = [] if self._logprobs is None else self._logprobs.response(records)
        return event

    def closed(self, block: Block) -> Iterator[Event]:
        done = {"type": f"response.{_NAMES[block.kind]}.done", **self._place(block)}
        if block.kind == "call":
            yield {**done, "name": block.name, "arguments": block.text}
        else:
            part = self._part(block)
            logprobs = {"logprobs": part["logprobs"]} if block.kind == "text" else {}
            yield {**done, "text": block.text, **logprobs}
            yield {"type": "response.content_part.done", **self._place(block), "part": part}
        yield {"type": "response.output_item.done", "output_index": block.index, "item": self._item(block)}

    def ended(self) -> Iterator[Event]:
        assert self.work is not None
        used = usage_of(self.work)
        self._usage = {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {**used["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": used["completion_tokens_details"]["reasoning_tokens"]},
            "total_tokens": used["total_tokens"],
        }
        if self.status == "completed":
            self._completed = int(time.time())
        self.work = None
        self._keep(self)
        yield {"type": f"response.{self.status}", "response": self.body()}

    def error(self, error: APIError) -> bytes:
        # The clients raise for the envelope, and know the event by its own fields.
        event = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        self.failure = error
        return self.sent({**event, **orjson.loads(error.body())}) + self.sent(
            {"type": "response.failed", "response": self.body()}
        )

    def _place(self, block: Block) -> dict[str, Any]:
        place = {"item_id": block.id, "output_index": block.index}
        return place if block.kind == "call" else {**place, "content_index": 0}

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        logprobs = [] if self._logprobs is None else self._logprobs.response(block.records)
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}

    def _item(self, block: Block) -> dict[str, Any]:
        cut = self.finish_reason == "length" and block is self.blocks[-1]
        status = "in_progress" if block.open else "incomplete" if cut else "completed"
        item: dict[str, Any] = {"id": block.id, "status": status}
        if block.kind == "call":
            call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return {**item, "type": "function_call", **call}
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": [self._part(block)]}
        return {**item, "type": "message", "role": "assistant", "content": [self._part(block)]}
