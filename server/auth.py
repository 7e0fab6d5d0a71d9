"""API keys: `Authorization: Bearer KEY`, or `x-api-key: KEY`, over everything that is not open by name.

Pure ASGI, around the router, so that no route can be forgotten. Whether a path exists is not told to strangers.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from server.answer import ErrorResponse
from server.errors import InvalidKey

OPEN_PATHS = frozenset({"/health", "/ready", "/version"})


class KeyGuard:
    """Lets through requests with a key, and those for open paths."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Iterable[str] = OPEN_PATHS) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._open = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and self._allows(scope)):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await ErrorResponse(InvalidKey("A valid API key is needed: Authorization: Bearer KEY."))(
                scope, receive, send
            )
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _allows(self, scope: Scope) -> bool:
        return not self._digests or scope["path"] in self._open or self._has_key(scope)

    def _has_key(self, scope: Scope) -> bool:
        given = [(name, value) for name, value in scope["headers"] if name in (b"authorization", b"x-api-key")]
        if len(given) != 1:
            return False
        [(name, key)] = given
        if name == b"authorization":
            scheme, _, key = key.partition(b" ")
            if scheme.lower() != b"bearer":
                return False
        digest = _digest(key.strip(b" "))
        # Every key is compared, in constant time, so that the time taken tells nothing.
        return sum([hmac.compare_digest(digest, own) for own in self._digests]) > 0


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
