"""The requests that have a raw prompt: of `POST /v1/completions`, of `/tokenize` and `/detokenize` in vLLM's form, and
of `POST /v1/cache/prefixes`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from server.protocol.fields import Fields, GenerationFields, Int, ModelName, whole

MAX_PROMPTS = 1024

Prompt = str | list[int]


def _prompts(value: object) -> object:
    """The four forms a prompt has, as a list of texts and token lists. Whether ids exist is checked later."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise PydanticCustomError("prompt_type", "must be a string, a list of strings, or lists of token ids")
    if not value:
        raise PydanticCustomError("prompt_empty", "must not be empty")
    if isinstance(value[0], str | list):
        if len(value) > MAX_PROMPTS:
            raise PydanticCustomError("prompt_count", f"must hold at most {MAX_PROMPTS} prompts")
        return [_prompt(item, type(value[0])) for item in value]
    return [_ids(value)]


def _prompt(item: object, kind: type) -> Prompt:
    if type(item) is not kind:
        raise PydanticCustomError("prompt_type", "must hold either strings or lists of token ids, not both")
    return item if isinstance(item, str) else _ids(item)


def _ids(items: object) -> list[int]:
    if not isinstance(items, list) or not items:
        raise PydanticCustomError("prompt_empty", "must not hold an empty list")
    if set(map(type, items)) == {int}:  # the fast way for thousands of ids
        return items
    wholes = [whole(item) for item in items]
    if set(map(type, wholes)) != {int}:
        raise PydanticCustomError("token_type", "must hold only whole numbers where it holds token ids")
    return wholes  # type: ignore[return-value]


class CompletionRequest(GenerationFields):
    """OpenAI's fields and vLLM's extensions for a text model. What is refused by name is in `checks`."""

    prompt: Annotated[
        Any, BeforeValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]])
    ]
    best_of: Annotated[Int, Field(ge=1, le=20)] | None = None
    echo: bool | None = None
    logprobs: Annotated[Int, Field(ge=0)] | None = None


class TokenizeRequest(Fields):
    """A raw prompt, as /v1/completions would read it."""

    model: ModelName
    prompt: str
    add_special_tokens: bool | None = None
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
