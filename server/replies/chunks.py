"""The answers of /v1/completions and /v1/chat/completions, whole and as server-sent events."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from server.choice import Choice, Delta, TokenRecord
from server.errors import APIError
from server.generation import Generation
from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import CompletionRequest
from server.protocol.fields import GenerationFields
from server.replies.head import usage_of
from server.replies.logprobs import LogprobShapes
from server.tools.parts import Part

DONE = b"data: [DONE]\n\n"


class ChunkWriter(ABC):
    """Turns deltas into events, or into one whole answer: what OpenAI's older APIs have in common. One per answer."""

    def __init__(
        self,
        head: Mapping[str, Any],
        fields: GenerationFields,
        work: Generation,
        logprobs: Callable[[Sequence[TokenRecord]], Any] | None,
        chunk: Mapping[str, Any],
    ) -> None:
        """`head` are the fields at the beginning of an answer, `chunk` those that a chunk has instead or besides;
        `logprobs` gives them their shape, None when they are not wanted."""
        self._head = {**head, "created": int(time.time())}
        self._chunk = {**self._head, **chunk}
        self._work = work
        self._logprobs = logprobs
        self._timings = bool(fields.timings)
        self._prompts = [one.prompt.tolist() for one in work.requests] if fields.return_token_ids else None
        self._scores = None if fields.prompt_logprobs is None else LogprobShapes(work, fields.prompt_logprobs).prompt
        options = fields.stream_options
        self._usage_at_end = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)

    @abstractmethod
    def choices(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        """What a delta says, as choice objects of one chunk each."""

    @abstractmethod
    def whole(self, answers: Sequence[Delta]) -> bytes: ...

    def events(self, choice: Choice, delta: Delta) -> bytes:
        """The events of a delta; nothing for one without anything to say."""
        usage = {"usage": usage_of(self._work)} if self._usage_always else {"usage": None} if self._usage_at_end else {}
        return b"".join([self._event({"choices": [body], **usage}) for body in self.choices(choice, delta)])

    def end(self) -> bytes:
        closing = self._closing(usage=self._usage_at_end)
        return self._event({"choices": [], **closing}) + DONE if closing else DONE

    def error(self, error: APIError) -> bytes:
        """The last event of a stream that breaks."""
        return b"data: " + error.body() + b"\n\n"

    def _event(self, content: Mapping[str, Any]) -> bytes:
        return b"data: " + orjson.dumps({**self._chunk, **content}) + b"\n\n"

    def _closing(self, *, usage: bool = True) -> dict[str, Any]:
        fields = {"usage": usage_of(self._work)} if usage else {}
        return fields | {"timings": self._work.timings()} if self._timings else fields

    def _choice(self, index: int, content: Mapping[str, Any], delta: Delta) -> dict[str, Any]:
        logprobs = None if self._logprobs is None else self._logprobs(delta.records)
        body = {"index": index, **content, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        if delta.stop is not None:
            body["stop_reason"] = delta.stop
        if self._prompts is not None:
            body["token_ids"] = delta.tokens
        return body


class CompletionWriter(ChunkWriter):
    def __init__(self, head: Mapping[str, Any], fields: CompletionRequest, work: Generation) -> None:
        shape = None if fields.logprobs is None else LogprobShapes(work, fields.logprobs).completion
        super().__init__({**head, "object": "text_completion"}, fields, work, shape, {})
        self._shown = fields.n or 1  # choices of a prompt that the client gets
        self._generated = fields.best_of or self._shown

    def choices(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        if not (delta.text or delta.records or delta.finish_reason or (self._prompts and delta.tokens)):
            return []
        body = self._choice(choice.index, {"text": delta.text}, delta)
        if self._prompts is not None and not choice.started:
            body["prompt_token_ids"] = self._prompts[choice.index // self._generated]
        choice.started = True
        return [body]

    def whole(self, answers: Sequence[Delta]) -> bytes:
        """When not all choices are shown, the most likely ones are, the best of them first."""
        choices: list[dict[str, Any]] = []
        for prompt in range(len(self._work.requests)):
            numbers = list(range(prompt * self._generated, (prompt + 1) * self._generated))
            if self._shown < self._generated:
                numbers.sort(key=lambda number: self._work.choices[number].mean_logprob, reverse=True)
            for number in numbers[: self._shown]:
                choices.append(self._choice(len(choices), {"text": answers[number].text}, answers[number]))
                if self._prompts is not None:
                    choices[-1]["prompt_token_ids"] = self._prompts[prompt]
            if self._scores is not None:
                choices[prompt * self._shown]["prompt_logprobs"] = self._scores(self._work.prompt_records(prompt))
        return orjson.dumps({**self._head, "choices": choices, **self._closing()})


class ChatWriter(ChunkWriter):
    """In a stream the role comes once per choice, in its first chunk; the finish reason in a chunk of its own."""

    def __init__(self, head: Mapping[str, Any], fields: ChatCompletionRequest, work: Generation) -> None:
        shape = LogprobShapes(work, fields.top_logprobs or 0).chat if fields.logprobs else None
        tier = {} if fields.service_tier is None else {"service_tier": "default"}
        chunk = {"object": "chat.completion.chunk", **tier}
        super().__init__({**head, "object": "chat.completion"}, fields, work, shape, chunk)
        self._extra = tier if fields.metadata is None else {**tier, "metadata": fields.metadata}

    def choices(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        bodies: list[dict[str, Any]] = []
        first, ended = not choice.started, delta.finish_reason is not None
        says = delta.text or delta.parts or delta.records
        if says or (self._prompts and delta.tokens) or (first and ended):
            choice.started = True
            content = {"delta": _content(choice, delta, first)}
            bodies.append(self._choice(choice.index, content, delta._replace(finish_reason=None, stop=None)))
            if first and self._prompts is not None:
                bodies[0]["prompt_token_ids"] = self._prompts[0]
        if ended:
            last = {"index": choice.index, "delta": {}, "logprobs": None, "finish_reason": delta.finish_reason}
            bodies.append(last if delta.stop is None else {**last, "stop_reason": delta.stop})
        return bodies

    def whole(self, answers: Sequence[Delta]) -> bytes:
        choices = []
        for choice, delta in zip(self._work.choices, answers, strict=True):
            message = {**_content(choice, delta, True), "refusal": None}
            for call in message.get("tool_calls", ()):
                del call["index"]
            if "tool_calls" not in message:
                message["content"] = delta.text
            choices.append(self._choice(choice.index, {"message": message}, delta))
        body = {**self._head, **self._extra, "choices": choices, **self._closing()}
        if self._prompts is not None:
            body["prompt_token_ids"] = self._prompts[0]
        if self._scores is not None:
            body["prompt_logprobs"] = self._scores(self._work.prompt_records(0))
        return orjson.dumps(body)


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
