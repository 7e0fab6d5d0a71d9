"""The answers of /v1/chat/completions, whole and streamed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from server.choice import Choice, Delta
from server.generation import Generation
from server.protocol.chat import ChatCompletionRequest
from server.replies.chunks import ChunkWriter
from server.replies.head import Head
from server.replies.logprobs import LogprobShapes
from server.tools.parts import Part

OBJECT = "chat.completion"


class ChatWriter(ChunkWriter):
    """In a stream the role comes once per choice, in its first chunk; the finish reason in a chunk of its own."""

    def __init__(
        self,
        head: Head,
        fields: ChatCompletionRequest,
        logprobs: LogprobShapes | None,
        prompt: Sequence[int] | None,
        scores: Callable[[], list[Any]] | None,
    ) -> None:
        """`prompt` are token ids, for a client that wants ids back; `scores` gives the prompt_logprobs."""
        tier = {} if fields.service_tier is None else {"service_tier": "default"}
        super().__init__(head, f"{OBJECT}.chunk", fields.stream_options, tier)
        self._extra = tier if fields.metadata is None else {**tier, "metadata": fields.metadata}
        self._logprobs = logprobs
        self._prompt = prompt
        self._scores = scores
        self._plain = logprobs is None and prompt is None

    def choices(self, choice: Choice, delta: Delta) -> list[bytes]:
        bodies = []
        first = not choice.started
        ended = delta.finish_reason is not None
        says = delta.text or delta.parts
        if says or delta.records or (self._prompt and delta.tokens) or (first and ended):
            choice.started = True
            if self._plain and not first and delta.parts is None:
                text = orjson.dumps(delta.text)
                bodies.append(
                    b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}' % (choice.index, text)
                )
            else:
                content = _content(choice, delta, first)
                body = self._choice(choice.index, "delta", content, delta._replace(finish_reason=None, stop=None))
                if first and self._prompt is not None:
                    body["prompt_token_ids"] = list(self._prompt)
                bodies.append(orjson.dumps(body))
        if ended:
            last = {"index": choice.index, "delta": {}, "logprobs": None, "finish_reason": delta.finish_reason}
            bodies.append(orjson.dumps(last if delta.stop is None else {**last, "stop_reason": delta.stop}))
        return bodies

    def whole(self, generation: Generation, answers: Sequence[Delta]) -> bytes:
        body = {**self._head.fields(OBJECT), **self._extra, "choices": [], **self._head.closing(generation)}
        for choice, delta in zip(generation.choices, answers, strict=True):
            message = {**_content(choice, delta, True), "refusal": None}
            for call in message.get("tool_calls", ()):
                del call["index"]
            if "tool_calls" not in message:
                message["content"] = delta.text
            body["choices"].append(self._choice(choice.index, "message", message, delta))
        if self._prompt is not None:
            body["prompt_token_ids"] = list(self._prompt)
        if self._scores is not None:
            body["prompt_logprobs"] = self._scores()
        return orjson.dumps(body)

    def _choice(self, index: int, kind: str, content: dict[str, Any], delta: Delta) -> dict[str, Any]:
        logprobs = None if self._logprobs is None else self._logprobs.chat(delta.records)
        body = {"index": index, kind: content, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        if delta.stop is not None:
            body["stop_reason"] = delta.stop
        if self._prompt is not None:
            body["token_ids"] = delta.tokens
        return body


def _content(choice: Choice, delta: Delta, first: bool) -> dict[str, Any]:
    """What a delta adds to a message: one entry for each call it adds to, with id and name in the call's first."""
    fields: dict[str, Any] = {"role": "assistant"} if first else {}
    if delta.text or first:
        fields["content"] = delta.text if delta.text or not delta.parts else None
    parts: Sequence[Part] = delta.parts or ()
    if thoughts := "".join([part.text for part in parts if part.kind == "reasoning"]):
        fields["reasoning_content"] = thoughts
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
