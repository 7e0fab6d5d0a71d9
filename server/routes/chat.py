"""`POST /v1/chat/completions`."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.answer import json_response
from server.generation import Echo
from server.intake import LengthPolicy, engine_request, sampling_params
from server.protocol.chat import ChatCompletionRequest
from server.protocol.checks import check_chat
from server.replies.chat import ChatChunks, ChatShape, chat_body
from server.replies.head import Head, new_id
from server.replies.logprobs import LogprobShapes
from server.routes.generating import all_of, bad_words, body_of, generation, parsed, prompt_scores, text_options
from server.state import ServerState
from server.streaming import EventStream
from server.tokenize import Tokenizing


def router(state: ServerState) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", openapi_extra=body_of(ChatCompletionRequest))
    async def chat(request: Request) -> Response:
        arrival = state.clock()
        fields, headers = await parsed(request, state, ChatCompletionRequest)
        check_chat(fields, state.limits)
        prompt = await state.tokenizing.run(_tokenised, state.tokenizing, fields)
        head = Head(new_id("chatcmpl"), fields.model, state.system_fingerprint, bool(fields.timings))
        alternatives = (fields.top_logprobs or 0) if fields.logprobs else None
        engine_work = engine_request(
            head.id,
            prompt,
            sampling_params(
                fields,
                logprobs=alternatives,
                prompt_logprobs=fields.prompt_logprobs,
                bad_words=await bad_words(state, fields),
            ),
            fields,
            choices=fields.n or 1,
            length=_length(fields),
            max_model_len=state.limits.max_model_len,
            arrival=arrival,
        )
        ids = engine_work.prompt.tolist()
        echoes = [] if fields.prompt_logprobs is None else [Echo(None, ids, scored=True)]
        work = generation(state, [engine_work], text_options(fields, logprobs=bool(fields.logprobs)), echoes)
        shape = _shape(state, fields, ids, alternatives, echoes)
        if fields.stream:
            writer = ChatChunks(head, fields.stream_options, shape)
            return EventStream(work, writer, state.keep_alive_seconds, headers)
        answers = await all_of(work, request)
        if isinstance(answers, Response):
            return answers
        return json_response(chat_body(head, work, answers, shape), headers=headers)

    return routes


def _tokenised(tokenizing: Tokenizing, fields: ChatCompletionRequest) -> list[int]:
    """The ids of the conversation. Runs in a worker thread."""
    variables: dict[str, Any] = dict(fields.chat_template_kwargs or {})
    if fields.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", fields.reasoning_effort)
    continues = bool(fields.continue_final_message)
    return tokenizing.encode_chat(
        [message.for_template() for message in fields.messages],
        add_generation_prompt=not continues if fields.add_generation_prompt is None else fields.add_generation_prompt,
        continue_final_message=continues,
        documents=fields.documents,
        variables=variables,
        add_special_tokens=bool(fields.add_special_tokens),
        truncates=fields.truncate_prompt_tokens is not None,
    )


def _length(fields: ChatCompletionRequest) -> LengthPolicy:
    if fields.max_completion_tokens is not None:
        return LengthPolicy(fields.max_completion_tokens, None, "max_completion_tokens", "messages")
    return LengthPolicy(fields.max_tokens, None, "max_tokens", "messages")


def _shape(
    state: ServerState, fields: ChatCompletionRequest, prompt: list[int], alternatives: int | None, echoes: list[Echo]
) -> ChatShape:
    extra: dict[str, Any] = {}
    if fields.service_tier is not None:
        extra["service_tier"] = "default"
    if fields.metadata is not None:
        extra["metadata"] = fields.metadata
    logprobs = None
    if alternatives is not None:
        logprobs = LogprobShapes(state.tokenizing.decoding, alternatives, fields.skip_special_tokens is not False)
    scores = partial(prompt_scores, state, fields, echoes[0]) if echoes else None
    return ChatShape(logprobs, prompt if fields.return_token_ids else None, extra, scores)
