"""API keys: `Authorization: Bearer KEY`, or `x-api-key: KEY`, over everything that is not open by name; admin keys
over what changes or shows more than one's own.

Pure ASGI, around the router, so that no route can be forgotten. Whether a path exists is not told to strangers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

from server.answer import ErrorResponse
from server.errors import InvalidKey
from server.exchange import current
from server.keys import KeyRing

OPEN_PATHS = frozenset({"/health", "/ready", "/version"})
ADMIN_PATHS = frozenset({"/v1/cache/reset", "/v1/cache/save", "/v1/cache/load"})  # there is no way in without a key
ADMIN_PREFIX = "/debug/"  # as everything else while there are no admin keys

# The key of the request being answered, as 16 digits that do not give it away; set before any route is entered.
caller: ContextVar[str] = ContextVar("caller", default="")


class KeyGuard:
    """Lets through requests with a key, and those for open paths."""

    def __init__(self, app: ASGIApp, keys: KeyRing, open_paths: Iterable[str] = OPEN_PATHS) -> None:
        self._app = app
        self._keys = keys
        self._open = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif (refusal := self._refusal(scope)) is not None:
            await ErrorResponse(refusal)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> InvalidKey | None:
        path: str = scope["path"]
        given = _given(scope)
        key = self._keys.find(given)
        caller.set(hashlib.sha256(given).hexdigest()[:16] if key is None else key.id)
        if key is not None and (exchange := current.get()) is not None:
            exchange.key = key.name
        if path in ADMIN_PATHS or (self._keys.has_admins and path.startswith(ADMIN_PREFIX)):
            if key is not None and key.admin:
                return None
            return InvalidKey(f"{path} needs an admin key, of --admin-api-key or of --api-key-file.")
        if key is not None or not self._keys.closed or path in self._open:
            return None
        return InvalidKey("A valid API key is needed: Authorization: Bearer KEY.")


def _given(scope: Scope) -> bytes:
    """The key that came with the request; empty when there is not exactly one."""
    given = [(name, value) for name, value in scope["headers"] if name in (b"authorization", b"x-api-key")]
    if len(given) != 1:
        return b""
    [(name, key)] = given
    if name == b"authorization":
        scheme, _, key = key.partition(b" ")
        if scheme.lower() != b"bearer":
            return b""
    return bytes(key.strip(b" "))
