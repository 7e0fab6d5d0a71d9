"""From a validated request to what the engine takes: sampling parameters, room in the context, requests.

The policy on lengths: a prompt must leave room for one token; an explicit `max_tokens` beyond the room left is refused
with the numbers, an absent one means all the room left (completions: 16, or what is left of it); truncation happens
only when asked for. Pure functions; nothing is queued here.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from models.sampling import SamplingParams
from scheduler.request import Request
from server.errors import ContextOverflow, wrong
from server.protocol.fields import GenerationFields

DEFAULT_COMPLETION_TOKENS = 16
SAME = (  # parameters that mean in the engine what they mean in a request, defaults included
    "seed", "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens", "ignore_eos",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LengthPolicy:
    """How many tokens a request wants, and the field it said so in."""

    asked: int | None
    default: int | None  # when none were asked for; None is all the room there is
    field: str  # where the limit was given
    prompt_field: str  # "prompt" or "messages"

    @property
    def wanted(self) -> int | None:
        return self.default if self.asked is None else self.asked


def sampling_params(
    request: GenerationFields,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None,
    bad_words: tuple[tuple[int, ...], ...],
) -> SamplingParams:
    """The parameters of a request, without its lengths. A seed is drawn when none is given."""
    given: dict[str, Any] = {name: value for name in SAME if (value := getattr(request, name)) is not None}
    return SamplingParams(
        **{"seed": random.getrandbits(63), **given},
        top_k=max(0, request.top_k or 0),
        logit_bias=tuple((request.logit_bias or {}).items()),
        allowed_token_ids=None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
        bad_words=bad_words,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop_token_ids=tuple(request.stop_token_ids or ()),
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
        # -1 keeps as many of the last as the context has room for beside the answer.
        beside = min(1 if length.wanted is None else length.wanted, max_model_len - 1)
        keep = fields.truncate_prompt_tokens
        tokens = tokens[-(max_model_len - beside if keep == -1 else keep) :]
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
