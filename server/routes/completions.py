"""`POST /v1/completions`."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request
from starlette.responses import Response

from scheduler.request import Request as EngineRequest
from server.choice import Echo
from server.intake import DEFAULT_COMPLETION_TOKENS, LengthPolicy, engine_request, sampling_params
from server.protocol.checks import check_completion
from server.protocol.completions import CompletionRequest
from server.protocol.structured import grammar_of
from server.replies.chunks import CompletionWriter
from server.replies.head import new_id
from server.routes.generating import (
    answered,
    bad_words,
    body_of,
    check_room,
    compiled,
    generation,
    parsed,
    raw_prompts,
    text_options,
)
from server.state import ServerState


def router(state: ServerState) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", openapi_extra=body_of(CompletionRequest))
    async def complete(request: Request) -> Response:
        arrival = state.clock()
        fields, headers = await parsed(request, state, CompletionRequest)
        check_completion(fields, state.limits)
        check_room(state, fields, _choices(fields), len(fields.prompt))
        truncates = fields.truncate_prompt_tokens is not None
        prompts = await raw_prompts(state, fields.prompt, fields.add_special_tokens, truncates=truncates)
        answer_id = new_id("cmpl")
        requests = _requests(state, fields, answer_id, prompts, await bad_words(state, fields), arrival)
        grammar = grammar_of(fields.response_format, fields.structured_outputs)
        constraint = await compiled(state, grammar, request.receive)
        requests = [replace(work, constraint=constraint) for work in requests]
        options = text_options(fields, logprobs=fields.logprobs is not None)
        work = generation(state, requests, options, _echoes(state, fields, requests))
        writer = CompletionWriter(state.head(answer_id, fields.model), fields, work)
        return await answered(request, state, work, writer, headers, stream=fields.stream)

    return routes


def _choices(fields: CompletionRequest) -> int:
    return fields.best_of or fields.n or 1


def _requests(
    state: ServerState,
    fields: CompletionRequest,
    answer_id: str,
    prompts: list[list[int]],
    words: tuple[tuple[int, ...], ...],
    arrival: float,
) -> list[EngineRequest]:
    choices = _choices(fields)
    scores_choices = choices > (fields.n or 1)
    of_prompt = [] if fields.prompt_logprobs is None else [fields.prompt_logprobs]
    of_prompt += [fields.logprobs] if fields.echo and fields.logprobs is not None else []
    params = sampling_params(
        fields,
        logprobs=0 if fields.logprobs is None and scores_choices else fields.logprobs,
        prompt_logprobs=max(of_prompt, default=None),
        bad_words=words,
    )
    length = LengthPolicy(fields.max_tokens, DEFAULT_COMPLETION_TOKENS, "max_tokens", "prompt")
    ids = [answer_id] if len(prompts) == 1 else [f"{answer_id}-{number}" for number in range(len(prompts))]
    return [
        engine_request(
            request_id,
            tokens,
            params,
            fields,
            choices=choices,
            length=length,
            max_model_len=state.limits.max_model_len,
            arrival=arrival,
        )
        for request_id, tokens in zip(ids, prompts, strict=True)
    ]


def _echoes(state: ServerState, fields: CompletionRequest, requests: list[EngineRequest]) -> list[Echo]:
    scored = fields.prompt_logprobs is not None
    if not fields.echo:
        return [Echo(None, request.prompt.tolist(), scored) for request in requests] if scored else []
    skip_special = fields.skip_special_tokens is not False
    echoes = []
    for prompt, request in zip(fields.prompt, requests, strict=True):
        tokens = request.prompt.tolist()
        as_given = isinstance(prompt, str) and fields.truncate_prompt_tokens is None
        text = prompt if as_given else state.tokenizing.decoding.text_of(tokens, skip_special)
        echoes.append(Echo(text, tokens, scored=scored or fields.logprobs is not None))
    return echoes
