"""Reading a request's JSON body: bounded, and strict about what it is.

Reading stops as soon as the body is too large, whether it said so beforehand or not.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.requests import Request

from server.errors import BodyTooLarge, BodyTooSlow, InvalidRequest, bounded

# What is still swallowed of a body that is too large, so that a client in the middle of sending it gets to read the
# answer instead of a reset connection.
LINGER_BYTES = 64 << 20
LINGER_SECONDS = 2.0
# A body that trickles would hold its connection for ever.
BODY_SECONDS = 120.0
CLOSE = {"connection": "close"}  # the rest of such a body is not read, so the connection cannot be used again


async def read_json(request: Request, limit_bytes: int) -> dict[str, Any]:
    """The body as an object. Raises an InvalidRequest, and ClientDisconnect when the client leaves."""
    _check_headers(request)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            data = await _read(request, limit_bytes)
    except TimeoutError:
        raise BodyTooSlow("The request body took too long to come.", headers=CLOSE) from None
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not JSON: {bounded(str(error), 200)}.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise InvalidRequest("The body must be a JSON object.", code="invalid_type")
    return body


def _check_headers(request: Request) -> None:
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise InvalidRequest(
            f"The content type is {bounded(kind, 60)!r}, and must be 'application/json'.",
            code="unsupported_content_type",
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise InvalidRequest(
            f"The content encoding {bounded(encoding, 60)!r} is not accepted: send the JSON as it is.",
            code="unsupported_content_encoding",
        )


async def _read(request: Request, limit_bytes: int) -> bytearray:
    pieces, data = request.stream(), bytearray()
    declared = request.headers.get("content-length", "0")
    too_large = declared.isdecimal() and int(declared) > limit_bytes
    if not too_large:
        async for piece in pieces:
            data += piece
            if too_large := len(data) > limit_bytes:
                break
    if not too_large:
        return data
    if data or request.headers.get("expect", "").lower() != "100-continue":
        data.clear()
        await _linger(pieces)
    raise BodyTooLarge(f"The request body is larger than {limit_bytes} bytes.", headers=CLOSE)


async def _linger(pieces: AsyncIterator[bytes]) -> None:
    swallowed = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            async for piece in pieces:
                swallowed += len(piece)
                if swallowed > LINGER_BYTES:
                    break
