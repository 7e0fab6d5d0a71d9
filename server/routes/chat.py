"""`POST /v1/chat/completions`."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.conversing import begin
from server.protocol.chat import ChatCompletionRequest
from server.replies.chat import ChatWriter
from server.replies.head import Head, new_id
from server.routes.generating import answered, body_of, parsed, prompt_scores, shapes
from server.state import ServerState


def router(state: ServerState) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", openapi_extra=body_of(ChatCompletionRequest))
    async def chat(request: Request) -> Response:
        arrival = state.clock()
        fields, headers = await parsed(request, state, ChatCompletionRequest)
        head = Head(new_id("chatcmpl"), fields.model, state.system_fingerprint, bool(fields.timings))
        work, echoes = await begin(state, fields, head.id, arrival, request.receive)
        writer = ChatWriter(
            head,
            fields,
            shapes(state, fields, fields.top_logprobs) if fields.logprobs else None,
            work.requests[0].prompt.tolist() if fields.return_token_ids else None,
            partial(prompt_scores, state, fields, echoes[0]) if echoes else None,
        )
        return await answered(request, state, work, writer, headers, stream=fields.stream)

    return routes
