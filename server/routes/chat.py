"""Conversations: `/v1/chat/completions`, the same in Anthropic's form under `/v1/messages`, and what a prompt is in
tokens, without generating: `/tokenize`, `/detokenize`, `/v1/chat/completions/render` and `/v1/messages/count_tokens`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.answer import object_response
from server.body import read_json
from server.conversing import begin, prompt_of, request_of
from server.errors import renaming
from server.protocol.chat import ChatCompletionRequest, TokenizeChatRequest
from server.protocol.checks import check_ids, read
from server.protocol.completions import DetokenizeRequest, TokenizeRequest
from server.protocol.messages import RENAMED, CountTokensRequest, MessageRequest, chat_of
from server.replies.chunks import ChatWriter
from server.replies.head import new_id
from server.replies.message import MessageWriter
from server.routes.generating import answered, body_of, parsed, raw_prompts, validated
from server.state import ServerState


def router(state: ServerState) -> APIRouter:
    routes = APIRouter()

    async def body_with_model(request: Request) -> dict[str, Any]:
        body = await read_json(request, state.max_body_bytes)
        return body if body.get("model") is not None else {**body, "model": state.model_names[0]}

    @routes.post("/v1/chat/completions", openapi_extra=body_of(ChatCompletionRequest))
    async def chat(request: Request) -> Response:
        arrival = state.clock()
        fields, headers = await parsed(request, state, ChatCompletionRequest)
        answer_id = new_id("chatcmpl")
        work = await begin(state, fields, answer_id, arrival, request.receive)
        writer = ChatWriter(state.head(answer_id, fields.model), fields, work)
        return await answered(request, state, work, writer, headers, stream=fields.stream)

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

    @routes.post("/tokenize", openapi_extra=body_of(TokenizeRequest, TokenizeChatRequest))
    async def tokenize(request: Request) -> Response:
        body = await body_with_model(request)
        if body.get("messages") is not None:
            chat, headers = validated(request, state, body, TokenizeChatRequest)
            tokens, named = await prompt_of(state, chat), chat.return_token_strs
        else:
            text, headers = validated(request, state, body, TokenizeRequest)
            [tokens] = await raw_prompts(state, [text.prompt], text.add_special_tokens, truncates=True)
            named = text.return_token_strs
        strings = state.tokenizing.names_of(tokens) if named else None
        answer = {"count": len(tokens), "max_model_len": state.limits.max_model_len, "tokens": tokens}
        return object_response({**answer, "token_strs": strings}, headers=headers)

    @routes.post("/detokenize", openapi_extra=body_of(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        fields, headers = validated(request, state, await body_with_model(request), DetokenizeRequest)
        check_ids(fields.tokens, "tokens", state.limits)
        text = await state.tokenizing.run(state.tokenizing.decoding.text_of, fields.tokens, False)
        return object_response({"prompt": text}, headers=headers)

    @routes.post("/v1/chat/completions/render", openapi_extra=body_of(ChatCompletionRequest))
    async def render(request: Request) -> Response:
        fields, headers = await parsed(request, state, ChatCompletionRequest)
        work = await request_of(state, fields, await prompt_of(state, fields), request.state.request_id, state.clock())
        tokens = work.prompt.tolist()
        answer = {
            "request_id": work.id,
            "model": fields.model,
            "token_ids": tokens,
            "prompt_text": await state.tokenizing.run(state.tokenizing.decoding.text_of, tokens, False),
            "sampling_params": {**dataclasses.asdict(work.params), "n": work.n, "stop": fields.stop or []},
            "stream": bool(fields.stream),
            "stream_options": fields.stream_options and fields.stream_options.model_dump(exclude_none=True),
            "cache_salt": fields.cache_salt,
            "priority": work.priority,
        }
        return object_response(answer, headers=headers)

    return routes
