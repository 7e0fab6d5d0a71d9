"""API keys: `Authorization: Bearer KEY`, or `x-api-key: KEY`, over everything that is not open by name; admin keys
over what changes or shows more than one's own.

Pure ASGI, around the router, so that no route can be forgotten. Whether a path exists is not told to strangers.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

from server.answer import ErrorResponse
from server.errors import InvalidKey

OPEN_PATHS = frozenset({"/health", "/ready", "/version"})
ADMIN_PATHS = frozenset({"/v1/cache/reset", "/v1/cache/save", "/v1/cache/load"})  # there is no way in without a key
ADMIN_PREFIX = "/debug/"  # as everything else while there are no admin keys

# The key of the request being answered, as 16 digits that do not give it away; set before any route is entered.
caller: ContextVar[str] = ContextVar("caller", default="")


class KeyGuard:
    """Lets through requests with a key, and those for open paths."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        admin_keys: Sequence[str] = (),
        open_paths: Iterable[str] = OPEN_PATHS,
    ) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._admins = [_digest(key.encode()) for key in admin_keys]
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
        digest = _given(scope)
        caller.set(digest.hex()[:16])
        if path in ADMIN_PATHS or (self._admins and path.startswith(ADMIN_PREFIX)):
            if _is_one_of(digest, self._admins):
                return None
            return InvalidKey(f"{path} needs an admin key; the server is given one with --admin-api-key.")
        if not self._digests or path in self._open or _is_one_of(digest, [*self._digests, *self._admins]):
            return None
        return InvalidKey("A valid API key is needed: Authorization: Bearer KEY.")


def _given(scope: Scope) -> bytes:
    """The digest of the key that came with the request; empty when there is not exactly one."""
    given = [(name, value) for name, value in scope["headers"] if name in (b"authorization", b"x-api-key")]
    if len(given) != 1:
        return b""
    [(name, key)] = given
    if name == b"authorization":
        scheme, _, key = key.partition(b" ")
        if scheme.lower() != b"bearer":
            return b""
    return _digest(key.strip(b" "))


def _is_one_of(digest: bytes, own: Sequence[bytes]) -> bool:
    # Every key is compared, in constant time, so that the time taken tells nothing.
    return sum([hmac.compare_digest(digest, one) for one in own]) > 0


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
