"""The requests of `POST /tokenize` and `POST /detokenize`, in vLLM's form, and of `POST /v1/cache/prefixes`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from server.protocol.chat import ChatCompletionRequest
from server.protocol.fields import Fields, Int, ModelName


class TokenizeRequest(Fields):
    """A raw prompt, as /v1/completions would read it."""

    model: ModelName
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatCompletionRequest):
    """A conversation; of the fields that /v1/chat/completions has, those that shape the prompt matter."""

    return_token_strs: bool | None = None


class DetokenizeRequest(Fields):
    model: ModelName
    tokens: Annotated[list[Int], Field(min_length=0)]


class PrefixRequest(Fields):
    """A raw prompt to be pinned; a conversation is a `ChatCompletionRequest`."""

    model: ModelName
    prompt: str | Annotated[list[Int], Field(min_length=1)]
    add_special_tokens: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
