"""The answers of /v1/completions."""

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

OBJECT = "text_completion"


@dataclass(frozen=True, slots=True)
class CompletionShape:
    """What the choices of one request carry beside text."""

    generated: int  # choices of each prompt in the engine
    shown: int  # how many of them the client gets: fewer with best_of
    logprobs: LogprobShapes | None
    prompts: Sequence[Sequence[int]] | None  # token ids, for a client that wants ids back
    scores: Callable[[int], list[Any]] | None = None  # the prompt_logprobs of a prompt

    def body(self, index: int, prompt: int, delta: Delta, *, first: bool) -> dict[str, Any]:
        """One element of `choices`, of a chunk or of a whole answer."""
        body: dict[str, Any] = {
            "index": index,
            "text": delta.text,
            "logprobs": None if self.logprobs is None else self.logprobs.completion(delta.records),
            "finish_reason": delta.finish_reason,
        }
        if delta.stop is not None:
            body["stop_reason"] = delta.stop
        if self.prompts is not None:
            body["token_ids"] = delta.tokens
            if first:
                body["prompt_token_ids"] = list(self.prompts[prompt])
        return body


class CompletionChunks(ChunkWriter):
    """The stream of a completion."""

    def __init__(self, head: Head, options: StreamOptions | None, shape: CompletionShape) -> None:
        super().__init__(head, OBJECT, options)
        self._shape = shape
        self._plain = shape.logprobs is None and shape.prompts is None

    def choices(self, choice: Choice, delta: Delta) -> list[bytes]:
        if not (delta.text or delta.records or delta.finish_reason or (self._shape.prompts and delta.tokens)):
            return []
        if self._plain and delta.finish_reason is None:
            text = orjson.dumps(delta.text)
            return [b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}' % (choice.index, text)]
        body = self._shape.body(choice.index, choice.index // self._shape.generated, delta, first=not choice.started)
        choice.started = True
        return [orjson.dumps(body)]


def completion_body(head: Head, generation: Generation, answers: Sequence[Collected], shape: CompletionShape) -> bytes:
    """The whole answer. When not all choices are shown, the most likely ones are, the best of them first."""
    choices: list[dict[str, Any]] = []
    for prompt in range(len(generation.requests)):
        numbers = list(range(prompt * shape.generated, (prompt + 1) * shape.generated))
        if shape.shown < shape.generated:
            numbers.sort(key=lambda number: generation.choices[number].mean_logprob, reverse=True)
        for number in numbers[: shape.shown]:
            choices.append(shape.body(len(choices), prompt, answers[number].delta(), first=True))
        if shape.scores is not None:
            choices[prompt * shape.shown]["prompt_logprobs"] = shape.scores(prompt)
    return orjson.dumps({**head.fields(OBJECT), "choices": choices, **head.closing(generation)})
