"""The answers of /v1/completions, whole and streamed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from server.choice import Choice, Delta
from server.generation import Generation
from server.protocol.completions import CompletionRequest
from server.replies.chunks import ChunkWriter
from server.replies.head import Head
from server.replies.logprobs import LogprobShapes

OBJECT = "text_completion"


class CompletionWriter(ChunkWriter):
    """`prompts` are token ids, for a client that wants ids back; `scores` gives the prompt_logprobs of a prompt."""

    def __init__(
        self,
        head: Head,
        fields: CompletionRequest,
        logprobs: LogprobShapes | None,
        prompts: Sequence[Sequence[int]] | None,
        scores: Callable[[int], list[Any]] | None,
    ) -> None:
        super().__init__(head, OBJECT, fields.stream_options)
        self._shown = fields.n or 1  # choices of a prompt that the client gets
        self._generated = fields.best_of or self._shown
        self._logprobs = logprobs
        self._prompts = prompts
        self._scores = scores
        self._plain = logprobs is None and prompts is None

    def choices(self, choice: Choice, delta: Delta) -> list[bytes]:
        if not (delta.text or delta.records or delta.finish_reason or (self._prompts and delta.tokens)):
            return []
        if self._plain and delta.finish_reason is None:
            text = orjson.dumps(delta.text)
            return [b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}' % (choice.index, text)]
        body = self._choice(choice.index, choice.index // self._generated, delta, first=not choice.started)
        choice.started = True
        return [orjson.dumps(body)]

    def whole(self, generation: Generation, answers: Sequence[Delta]) -> bytes:
        """When not all choices are shown, the most likely ones are, the best of them first."""
        choices: list[dict[str, Any]] = []
        for prompt in range(len(generation.requests)):
            numbers = list(range(prompt * self._generated, (prompt + 1) * self._generated))
            if self._shown < self._generated:
                numbers.sort(key=lambda number: generation.choices[number].mean_logprob, reverse=True)
            for number in numbers[: self._shown]:
                choices.append(self._choice(len(choices), prompt, answers[number], first=True))
            if self._scores is not None:
                choices[prompt * self._shown]["prompt_logprobs"] = self._scores(prompt)
        return orjson.dumps({**self._head.fields(OBJECT), "choices": choices, **self._head.closing(generation)})

    def _choice(self, index: int, prompt: int, delta: Delta, *, first: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "index": index,
            "text": delta.text,
            "logprobs": None if self._logprobs is None else self._logprobs.completion(delta.records),
            "finish_reason": delta.finish_reason,
        }
        if delta.stop is not None:
            body["stop_reason"] = delta.stop
        if self._prompts is not None:
            body["token_ids"] = delta.tokens
            if first:
                body["prompt_token_ids"] = list(self._prompts[prompt])
        return body
