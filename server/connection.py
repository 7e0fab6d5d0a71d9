"""uvicorn's HTTP/1.1 connection, with bounds on what a stranger can make it hold.

A request's head has to come whole, in time and in few bytes; so does everything between two pieces of a body. Trailers,
which would pass for headers that nobody in front of the server has looked at, are dropped. While connections hold
half of the process's descriptors, each new one ends the one that has been idle for longest. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.errors import InvalidRequest
from server.replies.head import new_id

MAX_HEAD_BYTES = 64 << 10
HEAD_SECONDS = 20.0
CONNECTIONS_SHARE = 1 / 2  # of the descriptors that the process may have open, beyond which idle ones give way
HEAD_OF_400 = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nx-request-id: %b\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n"
)


class Connection(HttpToolsProtocol):
    """Closed, after a 400, when its bounds are passed."""

    _head_timer: asyncio.TimerHandle | None = None
    _in_head = True
    _idle_since = 0.0  # on the loop's clock; the last answer's end counts
    _held_bytes = 0  # received since the head or a piece of the body was last complete
    _head_bytes = 0  # of the headers

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self._expect_head()
        if len(self.connections) > CONNECTIONS_SHARE * resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._held_bytes += len(data)
        super().data_received(data)
        if self._held_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets the envelope too."""
        error = InvalidRequest(msg, code="invalid_http")
        if (metrics := self.app_state.get("metrics")) is not None:
            metrics.responses.labels("400").inc()
            metrics.errors.labels(error.code).inc()
        body = error.body()
        self.transport.write(HEAD_OF_400 % (new_id("req").encode(), len(body)) + body)
        self.transport.close()

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(name) + len(value)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_arrived()
        upgrade = self.parser.should_upgrade()
        if len(self.url) + self._head_bytes > MAX_HEAD_BYTES:
            self.send_400_response("The head of the request is too large.")
        elif upgrade and any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers):
            # The parser takes what follows for the other protocol's, or for another request.
            self.send_400_response("There are no upgrades: send a request with a body without Upgrade.")
        else:
            super().on_headers_complete()
            if upgrade:
                self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._held_bytes = 0
        super().on_body(body)

    def _make_room(self) -> None:
        """Close the connection that has waited longest for a request: this one, where all others are being answered."""
        idle = (one for one in self.connections if isinstance(one, Connection) and one._idle())
        min(idle, key=lambda one: one._idle_since, default=self).transport.close()

    def _idle(self) -> bool:
        return not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete)

    def _expect_head(self) -> None:
        self._head_arrived()
        self._in_head, self._head_bytes = True, 0
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _head_arrived(self) -> None:
        self._held_bytes, self._in_head = 0, False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
