"""The outermost layer: a request id on every response, an answer whatever happens inside, and the end of every request
in metrics, log and trace.

Pure ASGI. A client's `x-request-id` is sent back if it is short and printable; it is never used as a key for anything.
"""

from __future__ import annotations

import logging

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.answer import ANTHROPIC_PATH, ErrorResponse
from server.errors import InternalError
from server.exchange import Exchange, current
from server.logs import log_request
from server.metrics import Metrics
from server.protocol.checks import printable
from server.replies.head import new_id
from server.tracing import Tracer

logger = logging.getLogger(__name__)

MAX_ID_CHARS = 128


class Edge:
    """Wraps the whole application."""

    def __init__(self, app: ASGIApp, metrics: Metrics, tracer: Tracer | None = None) -> None:
        self._app = app
        self._metrics = metrics
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = _client_id(scope) or new_id("req")
        exchange = Exchange(scope)
        current.set(exchange)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
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
            if exchange.status is not None:
                raise  # the server closes the connection
            await ErrorResponse(InternalError())(scope, receive, send_with_id)
        finally:
            self._over(exchange)

    def _over(self, exchange: Exchange) -> None:
        if exchange.error is not None:
            self._metrics.errors.labels(exchange.error).inc()
        log_request(exchange)
        if self._tracer is not None and exchange.scope["method"] == "POST":
            self._tracer.record(exchange)


def _client_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and 0 < len(value) <= MAX_ID_CHARS:
            text: str = value.decode("latin-1")
            return text if printable(text) else None
    return None
