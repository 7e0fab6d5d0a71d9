"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.answer import json_response
from server.conversing import begin, prompt_of
from server.generation import Echo, Generation
from server.protocol.chat import ChatCompletionRequest
from server.replies.chat import ChatChunks, ChatShape, chat_body
from server.replies.head import Head, new_id
from server.replies.logprobs import LogprobShapes
from server.routes.generating import all_of, body_of, parsed, prompt_scores
from server.state import ServerState
from server.streaming import EventStream


def router(state: ServerState) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", openapi_extra=body_of(ChatCompletionRequest))
    async def chat(request: Request) -> Response:
        arrival = state.clock()
        fields, headers = await parsed(request, state, ChatCompletionRequest)
        head = Head(new_id("chatcmpl"), fields.model, state.system_fingerprint, bool(fields.timings))
        work, echoes = await begin(state, fields, await prompt_of(state, fields), head.id, arrival, request.receive)
        shape = _shape(state, fields, work, echoes)
        if fields.stream:
            writer = ChatChunks(head, fields.stream_options, shape)
            return EventStream(work, writer, state.keep_alive_seconds, headers)
        answers = await all_of(work, request)
        if isinstance(answers, Response):
            return answers
        return json_response(chat_body(head, work, answers, shape), headers=headers)

    return routes


def _shape(state: ServerState, fields: ChatCompletionRequest, work: Generation, echoes: Sequence[Echo]) -> ChatShape:
    extra: dict[str, Any] = {}
    if fields.service_tier is not None:
        extra["service_tier"] = "default"
    if fields.metadata is not None:
        extra["metadata"] = fields.metadata
    logprobs = None
    if fields.logprobs:
        skip_special = fields.skip_special_tokens is not False
        logprobs = LogprobShapes(state.tokenizing.decoding, fields.top_logprobs or 0, skip_special)
    prompt = work.requests[0].prompt.tolist() if fields.return_token_ids else None
    scores = partial(prompt_scores, state, fields, echoes[0]) if echoes else None
    return ChatShape(logprobs, prompt, extra, scores)
