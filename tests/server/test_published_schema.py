"""Every answer and every chunk against OpenAI's published description of its API, where that is at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

HELLO = [{"role": "user", "content": "Hello"}]

FIELDS: list[dict[str, Any]] = [
    {},
    {"n": 3, "seed": 1},
    {"logprobs": True, "top_logprobs": 3},
    {"logprobs": True, "stop": ["e"], "n": 2},
    {"max_tokens": 1, "service_tier": "auto", "metadata": {"a": "b"}},
    {"stop": "o", "include_stop_str_in_output": True, "return_token_ids": True},
]
COMPLETION_FIELDS: list[dict[str, Any]] = [
    {},
    {"n": 3, "seed": 1, "best_of": 3},
    {"logprobs": 0},
    {"logprobs": 3, "stop": ["e"], "n": 2},
    {"prompt": ["Hello", "Yes"], "echo": True},
    {"prompt": [[5, 6], [7]], "max_tokens": 1, "return_token_ids": True},
]


@pytest.mark.parametrize("fields", FIELDS)
def test_chat_answers_and_chunks_are_as_published(
    server: Any, valid: Callable[..., None], fields: dict[str, Any]
) -> None:
    fields = {"messages": HELLO, "max_tokens": 12, **fields}
    valid("CreateChatCompletionResponse", server.post("/v1/chat/completions", **fields).json())
    for options in (None, {"include_usage": True}):
        for event in server.events("/v1/chat/completions", **fields, stream_options=options)[:-1]:
            valid("CreateChatCompletionStreamResponse", event)


@pytest.mark.parametrize("fields", COMPLETION_FIELDS)
def test_completions_are_as_published(server: Any, valid: Callable[..., None], fields: dict[str, Any]) -> None:
    fields = {"prompt": "Hello", "max_tokens": 12, **fields}
    valid("CreateCompletionResponse", server.post(**fields).json())
    for event in server.events(**fields)[:-1]:
        # The published schema is that of the whole answer, and has no null for a reason that is yet to come.
        for choice in event["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        valid("CreateCompletionResponse", event)


@pytest.mark.case(86)
def test_models_and_errors_are_as_published(server: Any, valid: Callable[..., None]) -> None:
    valid("ListModelsResponse", server.http.get("/v1/models").json())
    valid("Model", server.http.get(f"/v1/models/{server.model}").json())
    for response in (server.post(n=0), server.http.get("/nothing"), server.http.put("/health")):
        valid("ErrorResponse", response.json())
