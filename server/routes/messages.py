"""`/v1/messages` and `/v1/messages/count_tokens`: chat requests in Anthropic's form."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.answer import object_response
from server.body import read_json
from server.conversing import begin, prompt_of
from server.errors import renaming
from server.protocol.chat import ChatCompletionRequest
from server.protocol.checks import read
from server.protocol.messages import RENAMED, CountTokensRequest, MessageRequest, chat_of
from server.replies.head import new_id
from server.replies.message import MessageWriter
from server.routes.generating import answered, body_of, validated
from server.state import ServerState


def router(state: ServerState) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/messages", openapi_extra=body_of(MessageRequest))
    async def create(request: Request) -> Response:
        arrival = state.clock()
        body = await read_json(request, state.max_body_bytes)
        fields, headers = validated(request, state, body, MessageRequest)
        message_id = new_id("msg", "_")
        with renaming(RENAMED):
            chat, _ = read(chat_of(fields, body), ChatCompletionRequest)
            work = await begin(state, chat, message_id, arrival, request.receive)
        writer = MessageWriter(message_id, work, fields.model, request.state.request_id)
        return await answered(request, state, work, writer, headers, stream=fields.stream)

    @routes.post("/v1/messages/count_tokens", openapi_extra=body_of(CountTokensRequest))
    async def count(request: Request) -> Response:
        body = await read_json(request, state.max_body_bytes)
        fields, headers = validated(request, state, body, CountTokensRequest)
        with renaming(RENAMED):
            chat, _ = read(chat_of(fields, body), ChatCompletionRequest)
            tokens = await prompt_of(state, chat)
        return object_response({"input_tokens": len(tokens)}, headers=headers)

    return routes
