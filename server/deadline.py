"""How long a request may take, queue included: what the operator allows, or less where the client asks for less.

`x-request-deadline` is in seconds from the request's arrival, so that clocks need not agree. Pure ASGI; what is set
here is read where a request is handed to the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

from server.answer import ErrorResponse
from server.errors import InvalidRequest, shown

HEADER = b"x-request-deadline"

# Of the request being answered, as a reading of the clock; infinity where it may take for ever.
deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)


class Deadlines:
    """Sets `deadline`, or refuses a header that makes no sense."""

    def __init__(self, app: ASGIApp, clock: Callable[[], float], timeout_seconds: float | None) -> None:
        self._app = app
        self._clock = clock
        self._timeout_seconds = math.inf if timeout_seconds is None else timeout_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = [value for name, value in scope["headers"] if name == HEADER]
            try:
                asked = [float(value) for value in given]
            except ValueError:
                asked = [math.nan]
            if len(asked) > 1 or not all(seconds > 0 for seconds in asked):
                name, value = HEADER.decode(), shown(b", ".join(given).decode("latin-1"))
                error = InvalidRequest(f"'{name}' must be a number of seconds above 0, not {value}.", param=name)
                await ErrorResponse(error)(scope, receive, send)
                return
            deadline.set(self._clock() + min([self._timeout_seconds, *asked]))
        await self._app(scope, receive, send)
