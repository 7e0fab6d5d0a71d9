"""`/tokenize`, `/detokenize` and `/v1/chat/completions/render`: what a prompt is in tokens, without generating."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.answer import object_response
from server.body import read_json
from server.conversing import prompt_of, request_of
from server.protocol.chat import ChatCompletionRequest
from server.protocol.checks import check_ids
from server.protocol.tokens import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest
from server.routes.generating import body_of, parsed, validated
from server.state import ServerState


def router(state: ServerState) -> APIRouter:
    routes = APIRouter()

    async def body_with_model(request: Request) -> dict[str, Any]:
        body = await read_json(request, state.max_body_bytes)
        return body if body.get("model") is not None else {**body, "model": state.model_names[0]}

    @routes.post("/tokenize", openapi_extra=body_of(TokenizeRequest, TokenizeChatRequest))
    async def tokenize(request: Request) -> Response:
        body = await body_with_model(request)
        if body.get("messages") is not None:
            chat, headers = validated(request, state, body, TokenizeChatRequest)
            tokens, named = await prompt_of(state, chat), chat.return_token_strs
        else:
            text, headers = validated(request, state, body, TokenizeRequest)
            encode = partial(state.tokenizing.encode, add_special_tokens=text.add_special_tokens is not False)
            tokens, named = (
                await state.tokenizing.run(partial(encode, truncates=True), text.prompt),
                text.return_token_strs,
            )
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
