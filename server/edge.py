"""The outermost layer: a request id on every response, how long it may take, an answer whatever happens inside, and the
end of every request in metrics, log and trace.

Pure ASGI. A client's `x-request-id` is sent back if it is short and printable; it is never used as a key for anything.
Its `x-request-deadline` is in seconds from the request's arrival, queue included, so that clocks need not agree; the
operator's limit holds where it is less.
"""

from __future__ import annotations

import logging
import math
import re

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.answer import ANTHROPIC_PATH, ErrorResponse
from server.errors import InternalError, InvalidRequest, shown
from server.exchange import Exchange, current
from server.logs import log_request
from server.metrics import Metrics
from server.protocol.checks import printable
from server.replies.head import new_id
from server.tracing import Tracer

logger = logging.getLogger(__name__)

MAX_ID_CHARS = 128
DEADLINE_HEADER = "x-request-deadline"
_SECONDS = re.compile(r"[0-9]+(\.[0-9]+)?")  # what other languages take for a number too


class Edge:
    """Wraps the whole application."""

    def __init__(self, app: ASGIApp, metrics: Metrics, timeout_seconds: float | None, tracer: Tracer | None) -> None:
        self._app = app
        self._timeout_seconds = math.inf if timeout_seconds is None else timeout_seconds
        self._metrics = metrics
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state, headers = scope.setdefault("state", {}), Headers(scope=scope)
        state["request_id"] = _client_id(headers) or new_id("req")
        exchange = Exchange(scope)
        current.set(exchange)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                # Read now: a body's request_id may have taken its place.
                request_id = state["request_id"].encode()
                added = [(b"x-request-id", request_id)]
                if scope["path"].startswith(ANTHROPIC_PATH):
                    added.append((b"request-id", request_id))  # where Anthropic's clients look for it
                message = {**message, "headers": [*message.get("headers", []), *added]}
                self._metrics.responses.labels(str(message["status"])).inc()
            await send(message)

        try:
            exchange.deadline = exchange.began + min(self._timeout_seconds, _asked_seconds(headers))
            await self._app(scope, receive, send_with_id)
        except InvalidRequest as error:  # from here: those of the application are answered inside
            await ErrorResponse(error)(scope, receive, send_with_id)
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


def _client_id(headers: Headers) -> str | None:
    given = headers.get("x-request-id", "")
    return given if 0 < len(given) <= MAX_ID_CHARS and printable(given) else None


def _asked_seconds(headers: Headers) -> float:
    """How long the client would wait; infinity where it does not say. Raises InvalidRequest."""
    given = [value.strip(" \t") for value in headers.getlist(DEADLINE_HEADER)]
    asked = [float(value) if _SECONDS.fullmatch(value) else 0.0 for value in given]
    if len(asked) > 1 or 0.0 in asked:
        message = f"'{DEADLINE_HEADER}' must be a number of seconds above 0, not {shown(', '.join(given))}."
        raise InvalidRequest(message, param=DEADLINE_HEADER)
    return min(asked, default=math.inf)
