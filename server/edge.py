"""The outermost layer: a request id on every response, a count of responses by status, and an answer whatever happens
inside.

Pure ASGI. A client's `x-request-id` is sent back if it is short and printable; it is never used as a key for anything.
"""

from __future__ import annotations

import logging

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.answer import ANTHROPIC_PATH, ErrorResponse
from server.errors import InternalError
from server.metrics import Metrics
from server.protocol.checks import printable
from server.replies.head import new_id

logger = logging.getLogger(__name__)

MAX_ID_CHARS = 128


class Edge:
    """Wraps the whole application."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = _client_id(scope) or new_id("req")
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                # Read now: a body's request_id may have taken its place.
                request_id = state["request_id"].encode()
                headers = [*message.get("headers", []), (b"x-request-id", request_id)]
                if scope["path"].startswith(ANTHROPIC_PATH):
                    headers.append((b"request-id", request_id))  # where Anthropic's clients look for it
                message = {**message, "headers": headers}
                self._metrics.responses.labels(str(message["status"])).inc()
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            return  # in the middle of its own request: nobody is there to be answered
        except Exception:
            logger.exception("request %s failed", state["request_id"])
            if started:
                raise  # the server closes the connection
            await ErrorResponse(InternalError())(scope, receive, send_with_id)


def _client_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and 0 < len(value) <= MAX_ID_CHARS:
            text: str = value.decode("latin-1")
            return text if printable(text) else None
    return None
