"""The answers of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from server.choice import Choice, Delta
from server.generation import Generation
from server.protocol.fields import StreamOptions
from server.replies.chunks import ChunkWriter
from server.replies.head import Collected, Head
from server.replies.logprobs import LogprobShapes
from server.tools.parts import Part

OBJECT = "chat.completion"
CHUNK_OBJECT = "chat.completion.chunk"


@dataclass(frozen=True, slots=True)
class ChatShape:
    """What an answer carries beside text."""

    logprobs: LogprobShapes | None
    prompt: Sequence[int] | None  # token ids, for a client that wants ids back
    extra: dict[str, Any]  # fields of the whole answer: service_tier, metadata
    scores: Callable[[], list[Any]] | None = None  # the prompt_logprobs

    def logprobs_of(self, delta: Delta) -> dict[str, Any] | None:
        return None if self.logprobs is None else self.logprobs.chat(delta.records)


class ChatChunks(ChunkWriter):
    """The stream of a chat answer: the role once per choice, in its first chunk; the finish reason in a chunk of its
    own."""

    def __init__(self, head: Head, options: StreamOptions | None, shape: ChatShape) -> None:
        extra = {name: value for name, value in shape.extra.items() if name == "service_tier"}
        super().__init__(head, CHUNK_OBJECT, options, extra)
        self._shape = shape
        self._plain = shape.logprobs is None and shape.prompt is None

    def choices(self, choice: Choice, delta: Delta) -> list[bytes]:
        bodies = []
        first = not choice.started
        ended = delta.finish_reason is not None
        says = delta.text or delta.parts
        if says or delta.records or (self._shape.prompt and delta.tokens) or (first and ended):
            choice.started = True
            if self._plain and not first and delta.parts is None:
                text = orjson.dumps(delta.text)
                bodies.append(
                    b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}' % (choice.index, text)
                )
            else:
                bodies.append(orjson.dumps(self._body(choice, delta, first)))
        if ended:
            last = {"index": choice.index, "delta": {}, "logprobs": None, "finish_reason": delta.finish_reason}
            if delta.stop is not None:
                last["stop_reason"] = delta.stop
            bodies.append(orjson.dumps(last))
        return bodies

    def _body(self, choice: Choice, delta: Delta, first: bool) -> dict[str, Any]:
        content: dict[str, Any] = {"content": delta.text} if delta.text or first else {}
        if delta.parts:
            if first and not delta.text:
                content["content"] = None
            content |= _beside_text(delta.parts, choice)
        body: dict[str, Any] = {
            "index": choice.index,
            "delta": {"role": "assistant", **content} if first else content,
            "logprobs": self._shape.logprobs_of(delta),
            "finish_reason": None,
        }
        if self._shape.prompt is not None:
            body["token_ids"] = delta.tokens
            if first:
                body["prompt_token_ids"] = list(self._shape.prompt)
        return body


def chat_body(head: Head, generation: Generation, answers: Sequence[Collected], shape: ChatShape) -> bytes:
    """The whole answer."""
    choices = [_choice(index, answer.delta(), shape) for index, answer in enumerate(answers)]
    body = {**head.fields(OBJECT), **shape.extra, "choices": choices, **head.closing(generation)}
    if shape.prompt is not None:
        body["prompt_token_ids"] = list(shape.prompt)
    if shape.scores is not None:
        body["prompt_logprobs"] = shape.scores()
    return orjson.dumps(body)


def _choice(index: int, delta: Delta, shape: ChatShape) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
    if delta.parts is not None:
        message |= _whole_message(delta.parts)
    body: dict[str, Any] = {
        "index": index,
        "message": message,
        "logprobs": shape.logprobs_of(delta),
        "finish_reason": delta.finish_reason,
    }
    if delta.stop is not None:
        body["stop_reason"] = delta.stop
    if shape.prompt is not None:
        body["token_ids"] = delta.tokens
    return body


def _thoughts(parts: Sequence[Part]) -> dict[str, Any]:
    """The field that holds them, if there are any."""
    thoughts = "".join([part.text for part in parts if part.kind == "reasoning"])
    return {"reasoning_content": thoughts} if thoughts else {}


def _beside_text(parts: Sequence[Part], choice: Choice) -> dict[str, Any]:
    """What a chunk says beside text: one entry for each call it adds to, with id and name in the call's first."""
    fields = _thoughts(parts)
    calls: list[dict[str, Any]] = []
    for part in parts:
        if part.kind != "call":
            continue
        if part.name:
            choice.calls += 1
            function = {"name": part.name, "arguments": part.text}
            calls.append({"index": choice.calls - 1, "id": part.call_id, "type": "function", "function": function})
        elif calls:
            calls[-1]["function"]["arguments"] += part.text
        else:
            calls.append({"index": choice.calls - 1, "function": {"arguments": part.text}})
    if calls:
        fields["tool_calls"] = calls
    return fields


def _whole_message(parts: Sequence[Part]) -> dict[str, Any]:
    """Thoughts and calls of a whole answer. With calls and no text, the content is null."""
    fields = _thoughts(parts)
    calls: list[dict[str, Any]] = []
    for part in parts:
        if part.kind == "call" and part.name:
            function = {"name": part.name, "arguments": part.text}
            calls.append({"id": part.call_id, "type": "function", "function": function})
        elif part.kind == "call":
            calls[-1]["function"]["arguments"] += part.text
    if calls:
        fields["tool_calls"] = calls
        if not any(part.kind == "text" for part in parts):
            fields["content"] = None
    return fields
