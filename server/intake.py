"""From a validated request to what the engine takes: sampling parameters, room in the context, requests.

The policy on lengths: a prompt must leave room for one token; an explicit `max_tokens` beyond the room left is refused
with the numbers, an absent one means all the room left (completions: 16, or what is left of it); truncation happens
only when asked for. Pure functions; nothing is queued here.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from models.sampling import SamplingParams
from scheduler.request import Request
from server.errors import ContextOverflow, wrong
from server.protocol.fields import GenerationFields

T = TypeVar("T")

DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class LengthPolicy:
    """How many tokens a request wants, and the field it said so in."""

    asked: int | None
    default: int | None  # when none were asked for; None is all the room there is
    field: str  # where the limit was given
    prompt_field: str  # "prompt" or "messages"


def sampling_params(
    request: GenerationFields,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None,
    bad_words: tuple[tuple[int, ...], ...],
) -> SamplingParams:
    """The parameters of a request, without its lengths. A seed is drawn when none is given."""
    return SamplingParams(
        seed=random.getrandbits(63) if request.seed is None else request.seed,
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=max(0, request.top_k or 0),
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        logit_bias=tuple((request.logit_bias or {}).items()),
        allowed_token_ids=None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
        bad_words=bad_words,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        min_tokens=request.min_tokens or 0,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
    )


def engine_request(
    request_id: str,
    tokens: list[int],
    params: SamplingParams,
    fields: GenerationFields,
    *,
    choices: int,
    length: LengthPolicy,
    max_model_len: int,
    arrival: float,
) -> Request:
    """One prompt with its length settled.

    Raises InvalidRequest for an empty prompt and ContextOverflow when prompt or answer do not fit.
    """
    if fields.truncate_prompt_tokens is not None:
        tokens = _truncated(tokens, fields.truncate_prompt_tokens, length, max_model_len)
    if not tokens:
        raise wrong(length.prompt_field, "has no tokens, and must have one")
    max_tokens = _max_tokens(len(tokens), length, max_model_len)
    if params.min_tokens > max_tokens:
        raise wrong("min_tokens", f"({params.min_tokens}) is larger than the {max_tokens} tokens that may be generated")
    return Request(
        id=request_id,
        prompt=np.array(tokens, np.int32),
        params=replace(params, max_tokens=max_tokens),
        n=choices,
        priority=fields.priority or 0,
        namespace=fields.cache_salt,
        arrival=arrival,
    )


def _max_tokens(prompt_tokens: int, length: LengthPolicy, limit: int) -> int:
    room = limit - prompt_tokens
    if room < 0 or (room == 0 and length.asked != 0):
        raise ContextOverflow(
            f"This model's maximum context length is {limit} tokens. However, your {length.prompt_field} resulted in "
            f"{prompt_tokens} tokens, and at least one is needed for the answer. Please shorten them.",
            param=length.prompt_field,
        )
    if length.asked is None:
        return room if length.default is None else min(length.default, room)
    if length.asked > room:
        raise ContextOverflow(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{prompt_tokens + length.asked} tokens ({prompt_tokens} in the {length.prompt_field}, {length.asked} in "
            f"'{length.field}'). Please reduce one of them: there is room for {room} more tokens.",
            param=length.field,
        )
    return length.asked


def _truncated(tokens: list[int], keep: int, length: LengthPolicy, limit: int) -> list[int]:
    """The last `keep` tokens; -1 keeps as many as the context has room for beside the answer."""
    if keep == -1:
        keep = limit - min(_or(length.asked, _or(length.default, 1)), limit - 1)
    return tokens[-keep:]


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
