"""What the types cannot say: fields refused by name, unknown fields, limits of this model, and fields that contradict
each other.

Every failure is an InvalidRequest whose `param` names the field. Pure functions; nothing here knows the engine.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from server.errors import MAX_SHOWN_CHARS, InvalidRequest, bounded, from_validation, missing, shown, unsupported, wrong
from server.protocol.chat import ChatCompletionRequest, Message
from server.protocol.completions import CompletionRequest
from server.protocol.fields import Fields, GenerationFields
from server.protocol.messages import CountTokensRequest, MessageRequest
from server.protocol.responses import ResponseRequest

T = TypeVar("T", bound=Fields)

TYPO_SIMILARITY = 0.8
MAX_NAMED_FIELDS = 20
OPENAI_CHAT_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What this model and this operator allow."""

    vocab_size: int  # ids the model has embeddings for, padding included
    max_model_len: int  # tokens, prompt and answer together
    max_logprobs: int = OPENAI_CHAT_LOGPROBS
    strict_fields: bool = False  # refuse every unknown field, not just those that look like a typo
    priorities: bool = False  # whether the scheduler honours `priority`

    @property
    def max_completion_logprobs(self) -> int:
        """OpenAI allows 5 on completions where it allows 20 on chat; an operator who allows more allows it on both."""
        return self.max_logprobs if self.max_logprobs > OPENAI_CHAT_LOGPROBS else min(5, self.max_logprobs)


class Refusal(NamedTuple):
    """A known field that is not served: why, and the values that mean "not used"."""

    reason: str
    neutral: tuple[Any, ...] = (None,)


_TEXT_MODEL = Refusal("this is a text model")
_NOT_SERVED = Refusal("it is not served")
_OPENAI = {
    "moderation": Refusal("there is no moderation"),
    "prompt_cache_retention": Refusal("prefixes stay cached as long as there is room"),
    "prompt_cache_options": Refusal("prefixes are cached without being asked"),
}
_COMMON = {
    "use_beam_search": Refusal("beam search is not served", (None, False)),
    "length_penalty": Refusal("beam search is not served", (None, 1, 1.0)),
    "spaces_between_special_tokens": Refusal("special tokens are joined as they are", (None, True)),
    "truncation_side": Refusal("prompts are cut at their beginning", (None, "left")),
    "prompt_embeds": Refusal("prompts are text or token ids"),
    "kv_transfer_params": Refusal("keys and values stay in this process"),
    "vllm_xargs": Refusal("there are no plugins"),
    "repetition_detection": _NOT_SERVED,
    "return_tokens_as_token_ids": Refusal("use return_token_ids", (None, False)),
    "logits_processors": Refusal("code is not taken from clients", (None, [])),
    **{f"guided_{form}": Refusal(f"use structured_outputs.{form}") for form in ("json", "regex", "choice", "grammar")},
}
_CHAT_ONLY = Refusal("it is a field of /v1/chat/completions")
_MESSAGES = {
    **dict.fromkeys(("n", "stop", "response_format", "logprobs"), _CHAT_ONLY),
    **dict.fromkeys(("diagnostics", "inference_geo"), _NOT_SERVED),
    **dict.fromkeys(("user_profile_id", "workspace_id"), Refusal("there are no accounts")),
    "prefill": Refusal("end the messages with the assistant's"),
    "container": Refusal("there are no containers"),
    "mcp_servers": Refusal("there are no built-in tools"),
    "context_management": Refusal("contexts are not compacted"),
    "output_format": Refusal("use output_config.format"),
    "speed": Refusal("it is not served", (None, "standard")),
}
REFUSED: dict[type[Fields], Mapping[str, Refusal]] = {
    CompletionRequest: {
        **_COMMON,
        "suffix": Refusal("text is only continued, not filled in", (None, "")),
        "thinking_token_budget": _CHAT_ONLY,
    },
    ChatCompletionRequest: {
        **_COMMON,
        **_OPENAI,
        **dict.fromkeys(("audio", "media_io_kwargs", "mm_processor_kwargs"), _TEXT_MODEL),
        "functions": Refusal("use tools", (None, [])),
        "function_call": Refusal("use tool_choice", (None, "none")),
        "prediction": Refusal("predicted outputs are not served"),
        "web_search_options": Refusal("there is no web search"),
        "verbosity": Refusal("the model has no such setting", (None, "medium")),
        "store": Refusal("chat completions are not stored", (None, False)),
        "chat_template": Refusal("templates are not taken from clients"),
        "echo": Refusal("chat answers hold only the answer", (None, False)),
        "best_of": Refusal("it is a field of /v1/completions"),
    },
    CountTokensRequest: _MESSAGES | {"max_tokens": Refusal("it is a field of /v1/messages")},  # no misspelt min_tokens
    MessageRequest: _MESSAGES,
    ResponseRequest: {
        **_OPENAI,
        **dict.fromkeys(
            ("messages", "n", "stop", "max_tokens", "max_completion_tokens", "response_format", "logprobs"), _CHAT_ONLY
        ),
        "access_programs": Refusal("there are no accounts"),
        "background_options": _NOT_SERVED,
        "image": _TEXT_MODEL,
        "conversation": Refusal("conversations are not stored; use previous_response_id"),
        "prompt": Refusal("there are no prompt templates"),
        "context_management": Refusal("contexts are not compacted"),
    },
}


def read(body: Mapping[str, object], model: type[T]) -> tuple[T, tuple[str, ...]]:
    """A body as far as its types say, and the names in it that are not known."""
    unknown = check_names(body, model)
    try:
        return model.model_validate(body), unknown
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False)) from None


def check_names(body: Mapping[str, object], model: type[Fields]) -> tuple[str, ...]:
    """Refuse fields that are refused by name, and misspelt ones. Returns the names that are not known."""
    refused = next((REFUSED[kind] for kind in model.__mro__ if kind in REFUSED), {})
    unknown = []
    for name, value in body.items():
        if name in refused:
            reason, neutral = refused[name]
            if not any(type(value) is type(one) and value == one for one in neutral):
                raise unsupported(name, f"is not supported: {reason}")
        elif name not in model.model_fields:
            unknown.append(name)
    for name in unknown[:MAX_NAMED_FIELDS]:
        _refuse_typo(name, name, model)
    return tuple(unknown)


def unknown_inside(request: Fields) -> tuple[str, ...]:
    """Names inside messages and options that are not known and hold something. Refuses misspelt ones."""
    found: dict[str, None] = {}

    def look(fields: Fields, path: str) -> None:
        for name in fields.model_fields_set & type(fields).model_fields.keys():
            value = getattr(fields, name)
            for item in value if isinstance(value, list) and value and isinstance(value[0], Fields) else [value]:
                if isinstance(item, Fields):
                    place = f"{path}{name}[]." if isinstance(value, list) else f"{path}{name}."
                    for extra, content in (item.model_extra or {}).items():
                        if content not in (None, "", [], {}):
                            _refuse_typo(extra, place + extra, type(item))
                            found[place + extra] = None
                    look(item, place)

    look(request, "")
    return tuple(found)


def _refuse_typo(name: str, path: str, model: type[Fields]) -> None:
    known = [field.alias or own for own, field in model.model_fields.items()]
    if meant := difflib.get_close_matches(bounded(name, 40), known, n=1, cutoff=TYPO_SIMILARITY):
        raise unknown_field(path, f" Did you mean '{meant[0]}'?")


def unknown_field(name: str, hint: str = "") -> InvalidRequest:
    return InvalidRequest(
        f"Unknown field {shown(name)}.{hint}", param=bounded(name, MAX_SHOWN_CHARS), code="unknown_parameter"
    )


def check_common(request: GenerationFields, limits: ServerLimits) -> None:
    """The rules of every request that generates."""
    check_ids(request.logit_bias or (), "logit_bias", limits)
    check_ids(request.stop_token_ids or (), "stop_token_ids", limits)
    check_ids(request.allowed_token_ids or (), "allowed_token_ids", limits)
    if request.prompt_logprobs is not None:
        _check_at_most(request.prompt_logprobs, limits.max_logprobs, "prompt_logprobs")
        if request.stream:
            raise wrong("prompt_logprobs", "is only allowed without 'stream'")
    if request.stream_options is not None:
        if not request.stream:
            raise wrong("stream_options", "is only allowed with 'stream': true")
        if request.stream_options.include_obfuscation:
            raise unsupported("stream_options.include_obfuscation", "is not supported: chunks are not padded")
    if request.priority and not limits.priorities:
        raise unsupported("priority", "needs a server with --scheduling-policy priority")
    if request.truncate_prompt_tokens == 0:
        raise wrong("truncate_prompt_tokens", "must be at least 1, or -1")
    if request.structured_outputs is not None and request.allowed_token_ids is not None:
        raise wrong("allowed_token_ids", "and 'structured_outputs' exclude each other")
    if request.request_id is not None and not printable(request.request_id):
        raise wrong("request_id", "must be printable ASCII")


def check_completion(request: CompletionRequest, limits: ServerLimits) -> None:
    check_common(request, limits)
    for prompt in request.prompt:
        if isinstance(prompt, list):
            check_ids(prompt, "prompt", limits)
    if request.logprobs is not None:
        _check_at_most(request.logprobs, limits.max_completion_logprobs, "logprobs")
    if request.max_tokens == 0 and not request.echo and request.prompt_logprobs is None:
        raise wrong("max_tokens", "must be at least 1 without 'echo' or 'prompt_logprobs'")
    if request.best_of is not None:
        if request.best_of < (request.n or 1):
            raise wrong("best_of", "must be at least 'n'")
        if request.stream and request.best_of > (request.n or 1):
            raise wrong("best_of", "larger than 'n' cannot be streamed")
    _check_min_tokens(request.min_tokens, request.max_tokens)


def check_chat(request: ChatCompletionRequest, limits: ServerLimits) -> None:
    check_common(request, limits)
    check_calls(request.messages)
    for index, message in enumerate(request.messages):
        if message.content is None and not (message.tool_calls or message.refusal or message.reasoning_content):
            raise missing(f"messages[{index}].content")
    if request.top_logprobs is not None:
        if not request.logprobs and request.top_logprobs > 0:
            raise wrong("top_logprobs", "is only allowed with 'logprobs': true")
        _check_at_most(request.top_logprobs, limits.max_logprobs, "top_logprobs")
    if None not in (request.max_tokens, request.max_completion_tokens) and (
        request.max_tokens != request.max_completion_tokens
    ):
        raise wrong("max_tokens", "and 'max_completion_tokens' mean the same and differ here; give one")
    if request.add_generation_prompt and request.continue_final_message:
        raise wrong("continue_final_message", "and 'add_generation_prompt' exclude each other")
    _check_min_tokens(request.min_tokens, request.max_completion_tokens or request.max_tokens)


def printable(text: str) -> bool:
    """Whether `text` can stand in a header."""
    return text.isascii() and text.isprintable()


def check_calls(messages: Sequence[Message]) -> None:
    """A tool's result has to answer a call made before it; without an id it is taken to answer the calls in turn."""
    calls: set[str | None] | None = None
    for index, message in enumerate(messages):
        if message.tool_calls:
            calls = {None, *(calls or ()), *(call.id for call in message.tool_calls)}
        if message.role != "tool":
            continue
        if calls is None:
            raise wrong(f"messages[{index}].role", "is 'tool', and no message before it has 'tool_calls'")
        if message.tool_call_id not in calls:
            raise wrong(f"messages[{index}].tool_call_id", f"is {shown(message.tool_call_id)}, which no call has")


def check_ids(ids: Collection[int], field: str, limits: ServerLimits) -> None:
    """Raises InvalidRequest for an id that the model does not have."""
    if not ids or (min(ids) >= 0 and max(ids) < limits.vocab_size):
        return
    for token in ids:
        if not 0 <= token < limits.vocab_size:
            raise wrong(field, f"has token id {shown(token)}, and the model's ids are 0 to {limits.vocab_size - 1}")


def _check_at_most(value: int, limit: int, field: str) -> None:
    if value > limit:
        raise wrong(field, f"must be at most {limit}, not {shown(value)}")


def _check_min_tokens(low: int | None, high: int | None) -> None:
    if low is not None and high is not None and low > high:
        raise wrong("min_tokens", f"({low}) is larger than 'max_tokens' ({high})")
