"""`/v1/responses`: chat requests in another form, whose answers are kept for a while."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from server.answer import object_response
from server.body import read_json
from server.conversing import begin, prompt_of
from server.errors import APIError, InternalError, InvalidRequest, renaming, shown, unsupported, wrong
from server.generation import ClientGone, Generation
from server.protocol.chat import ChatCompletionRequest
from server.protocol.checks import read
from server.protocol.responses import RENAMED, ResponseRequest, chat_of
from server.replies.head import new_id
from server.replies.response import ResponseWriter
from server.response_store import ResponseStore
from server.routes.generating import answered, body_of, validated
from server.routes.query import refuse_other
from server.state import ServerState

logger = logging.getLogger(__name__)


def router(state: ServerState) -> APIRouter:
    routes = APIRouter()
    store = ResponseStore(state.owner)
    running: set[asyncio.Task[None]] = set()  # or they would be collected

    async def asked(
        request: Request,
    ) -> tuple[ResponseRequest, dict[str, str], ChatCompletionRequest, list[dict[str, object]]]:
        body = await read_json(request, state.max_body_bytes)
        fields, headers = validated(request, state, body, ResponseRequest)
        before = [] if fields.previous_response_id is None else store.conversation(fields.previous_response_id)
        chat, messages = chat_of(fields, body, before)
        with renaming(RENAMED):
            return fields, headers, read(chat, ChatCompletionRequest)[0], messages

    @routes.post("/v1/responses", openapi_extra=body_of(ResponseRequest))
    async def create(request: Request) -> Response:
        arrival = state.clock()
        fields, headers, chat, messages = await asked(request)
        response_id = new_id("resp", "_")
        with renaming(RENAMED):
            work = await begin(state, chat, response_id, arrival, request.receive)

        def keep(response: ResponseWriter) -> None:
            if fields.store is not False:
                store.put(response, messages)

        writer = ResponseWriter(response_id, fields, work, keep)
        if not fields.background:
            return await answered(request, state, work, writer, headers, stream=fields.stream)
        keep(writer)
        task = asyncio.create_task(_collect(work, writer))
        running.add(task)
        task.add_done_callback(running.discard)
        return object_response(writer.body(), headers=headers)

    @routes.post("/v1/responses/input_tokens", openapi_extra=body_of(ResponseRequest))
    async def count(request: Request) -> Response:
        _, headers, chat, _ = await asked(request)
        with renaming(RENAMED):
            tokens = await prompt_of(state, chat)
        return object_response({"object": "response.input_tokens", "input_tokens": len(tokens)}, headers=headers)

    @routes.get("/v1/responses/{response_id}")
    async def retrieve(request: Request, response_id: str, stream: bool = False) -> Response:
        if stream:
            raise unsupported("stream", "is not supported: what was streamed once is not kept")
        refuse_other(request, "stream")
        return object_response(store.get(response_id).body())

    @routes.get("/v1/responses/{response_id}/input_items")
    async def input_items(
        request: Request,
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        refuse_other(request, "limit", "order", "after")
        items = store.get(response_id).input_items()
        if order == "desc":
            items.reverse()
        ids = [item["id"] for item in items]
        if after is not None and after not in ids:
            raise wrong("after", f"is {shown(after)}, which no item has for an id")
        first = 0 if after is None else ids.index(after) + 1
        page = items[first : first + limit]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        return object_response({"object": "list", "data": page, "has_more": first + limit < len(items), **ends})

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
                    writer.events(choice, delta)
    except ClientGone:
        pass  # cancelled
    except Exception as error:
        if not isinstance(error, APIError):
            logger.exception("a response in the background broke off")
            error = InternalError()
        writer.error(error)
