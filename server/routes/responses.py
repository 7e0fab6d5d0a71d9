"""`/v1/responses`: chat requests in another form, whose answers are kept for a while."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.answer import object_response
from server.body import read_json
from server.conversing import begin, chat_request, prompt_of
from server.errors import APIError, InternalError, InvalidRequest, UnsupportedField, renaming
from server.generation import ClientGone, Generation
from server.protocol.chat import ChatCompletionRequest
from server.protocol.responses import RENAMED, ResponseRequest, chat_of
from server.replies.head import new_id
from server.replies.logprobs import LogprobShapes
from server.replies.response import ResponseWriter
from server.response_store import ResponseStore
from server.routes.generating import all_of, body_of, validated
from server.state import ServerState
from server.streaming import EventStream

logger = logging.getLogger(__name__)


def router(state: ServerState) -> APIRouter:
    routes = APIRouter()
    store = ResponseStore()
    running: set[asyncio.Task[None]] = set()  # or they would be collected

    async def read(
        request: Request,
    ) -> tuple[ResponseRequest, dict[str, str], ChatCompletionRequest, list[dict[str, object]]]:
        body = await read_json(request, state.max_body_bytes)
        fields, headers = validated(request, state, body, ResponseRequest)
        before = [] if fields.previous_response_id is None else store.conversation(fields.previous_response_id)
        chat, messages = chat_of(fields, body, before)
        with renaming(RENAMED):
            return fields, headers, chat_request(chat), messages

    @routes.post("/v1/responses", openapi_extra=body_of(ResponseRequest))
    async def create(request: Request) -> Response:
        arrival = state.clock()
        fields, headers, chat, messages = await read(request)
        response_id = new_id("resp", "_")
        with renaming(RENAMED):
            work, _ = await begin(state, chat, await prompt_of(state, chat), response_id, arrival, request.receive)
        logprobs = None
        if fields.wants_logprobs:
            skip_special = fields.skip_special_tokens is not False
            logprobs = LogprobShapes(state.tokenizing.decoding, fields.top_logprobs or 0, skip_special)

        def keep(response: ResponseWriter) -> None:
            if fields.store is not False:
                store.put(response, messages)

        writer = ResponseWriter(response_id, fields, logprobs, keep)
        if fields.background:
            writer.work = work
            keep(writer)
            task = asyncio.create_task(_collect(work, writer))
            running.add(task)
            task.add_done_callback(running.discard)
        elif fields.stream:
            return EventStream(work, writer, state.keep_alive_seconds, headers)
        else:
            answers = await all_of(work, request)
            if isinstance(answers, Response):
                return answers
            writer.events(work, work.choices[0], answers[0].delta())
        return object_response(writer.body(), headers=headers)

    @routes.post("/v1/responses/input_tokens", openapi_extra=body_of(ResponseRequest))
    async def count(request: Request) -> Response:
        _, headers, chat, _ = await read(request)
        with renaming(RENAMED):
            tokens = await prompt_of(state, chat)
        return object_response({"object": "response.input_tokens", "input_tokens": len(tokens)}, headers=headers)

    @routes.get("/v1/responses/{response_id}")
    async def retrieve(response_id: str, stream: bool = False) -> Response:
        if stream:
            raise UnsupportedField("'stream' is not supported: what was streamed once is not kept.", param="stream")
        return object_response(store.get(response_id).body())

    @routes.post("/v1/responses/{response_id}/cancel")
    async def cancel(response_id: str) -> Response:
        writer = store.get(response_id)
        if writer.status == "in_progress" and writer.work is not None:
            if not writer.body()["background"]:
                raise InvalidRequest("Only a response made with 'background' can be cancelled.", param="response_id")
            writer.work.client_gone()
        return object_response(writer.body())

    @routes.delete("/v1/responses/{response_id}")
    async def delete(response_id: str) -> Response:
        store.delete(response_id)
        return object_response({"id": response_id, "object": "response", "deleted": True})

    return routes


async def _collect(work: Generation, writer: ResponseWriter) -> None:
    """Write an answer that nobody waits for."""
    try:
        async with contextlib.aclosing(work.deltas()) as deltas:
            async for news in deltas:
                for choice, delta in news:
                    writer.events(work, choice, delta)
    except ClientGone:
        pass  # cancelled
    except Exception as error:
        if not isinstance(error, APIError):
            logger.exception("a response in the background broke off")
            error = InternalError()
        writer.error(error)
