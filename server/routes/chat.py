"""`POST /v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.conversing import begin
from server.protocol.chat import ChatCompletionRequest
from server.replies.chunks import ChatWriter
from server.replies.head import new_id
from server.routes.generating import answered, body_of, parsed
from server.state import ServerState


def router(state: ServerState) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", openapi_extra=body_of(ChatCompletionRequest))
    async def chat(request: Request) -> Response:
        arrival = state.clock()
        fields, headers = await parsed(request, state, ChatCompletionRequest)
        answer_id = new_id("chatcmpl")
        work = await begin(state, fields, answer_id, arrival, request.receive)
        writer = ChatWriter(state.head(answer_id, fields.model), fields, work)
        return await answered(request, state, work, writer, headers, stream=fields.stream)

    return routes
