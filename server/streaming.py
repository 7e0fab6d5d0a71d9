"""Sending an answer while it is generated, and noticing that nobody is there to read it.

Each update of the engine becomes one write. The response starts with the first of them, so that a request which fails
before its first token still gets a proper status; a stream that is silent for long gets comments, which clients skip.
The connection is watched from the first moment on, streamed or not: a client that leaves cancels its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.choice import Delta, merged
from server.errors import APIError, InternalError
from server.exchange import note_error
from server.generation import ClientGone, Generation
from server.replies.blocks import BlockWriter
from server.replies.chunks import ChunkWriter

logger = logging.getLogger(__name__)

AnswerWriter = ChunkWriter | BlockWriter
KEEP_ALIVE = b": waiting\n\n"

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or nginx keeps events back
)


async def collected(generation: Generation, receive: Receive) -> list[Delta]:
    """All of an answer, choice by choice. Raises ClientGone when the client leaves first."""
    answers: list[list[Delta]] = [[] for _ in generation.choices]
    async with watched(generation, receive), contextlib.aclosing(generation.deltas()) as deltas:
        async for news in deltas:
            for choice, delta in news:
                answers[choice.index].append(delta)
    return [merged(deltas) for deltas in answers]


async def left(receive: Receive) -> None:
    """Returns when the client has; its request's body must have been read from `receive`."""
    while (await receive())["type"] != "http.disconnect":
        pass


@contextlib.asynccontextmanager
async def watched(generation: Generation, receive: Receive) -> AsyncIterator[None]:
    async def watch() -> None:
        await left(receive)
        generation.client_gone()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


class EventStream(Response):
    def __init__(
        self, generation: Generation, writer: AnswerWriter, keep_alive_seconds: float, headers: Mapping[str, str]
    ) -> None:
        self.status_code = 200
        self.background = None
        self._generation = generation
        self._writer = writer
        self._keep_alive_seconds = keep_alive_seconds
        self._start_headers = [*HEADERS, *((name.encode(), value.encode()) for name, value in headers.items())]
        self._started = False
        self._spoken = False  # since the last look of the keep-alive task

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        comments = asyncio.create_task(self._keep_alive(send))
        try:
            async with watched(self._generation, receive):
                await self._stream(send)
        except ClientGone:
            pass
        except Exception as error:
            if not self._started:
                raise
            # The task may be in the middle of a comment; what follows must be the last thing sent.
            comments.cancel()
            if not isinstance(error, APIError):
                logger.exception("a stream broke off")
                error = InternalError()
            note_error(error.code)
            await self._send(send, self._writer.error(error), last=True)
        finally:
            comments.cancel()

    async def _stream(self, send: Send) -> None:
        generation, writer = self._generation, self._writer
        async with contextlib.aclosing(generation.deltas()) as deltas:
            async for news in deltas:
                data = b"".join([writer.events(choice, delta) for choice, delta in news])
                if generation.finished:
                    await self._send(send, data + writer.end(), last=True)
                elif data:
                    await self._send(send, data)

    async def _send(self, send: Send, data: bytes, last: bool = False) -> None:
        self._spoken = True
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": self._start_headers})
        await send({"type": "http.response.body", "body": data, "more_body": not last})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            self._spoken = False
            await asyncio.sleep(self._keep_alive_seconds)
            if not self._spoken:
                await self._send(send, KEEP_ALIVE)
