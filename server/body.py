"""Reading a request's JSON body: bounded, and strict about what it is.

Reading stops as soon as the body is too large, whether it said so beforehand or not.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from server.errors import BodyTooLarge, BodyTooSlow, InvalidRequest, bounded

# What is still swallowed of a body that is too large, so that a client in the middle of sending it gets to read the
# answer instead of a reset connection.
LINGER_BYTES = 64 << 20
LINGER_SECONDS = 2.0
# A body that trickles would hold its connection for ever.
BODY_SECONDS = 120.0


async def read_json(request: Request, limit_bytes: int) -> dict[str, Any]:
    """The body as an object. Raises an InvalidRequest, and ClientDisconnect when the client leaves."""
    _check_headers(request)
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limit_bytes:
        if request.headers.get("expect", "").lower() != "100-continue":
            await _linger(request)
        raise BodyTooLarge(limit_bytes)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            data = await _read(request, limit_bytes)
    except TimeoutError:
        raise BodyTooSlow from None
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not JSON: {bounded(str(error), 200)}.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise InvalidRequest("The body must be a JSON object.", code="invalid_type")
    return body


async def _read(request: Request, limit_bytes: int) -> bytearray:
    data = bytearray()
    more = True
    while more:
        piece, more = await _piece(request)
        data += piece
        if len(data) > limit_bytes:
            data.clear()
            if more:
                await _linger(request)
            raise BodyTooLarge(limit_bytes)
    return data


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


async def _piece(request: Request) -> tuple[bytes, bool]:
    """The next piece of the body and whether there is more. Raises ClientDisconnect."""
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message.get("body", b""), message.get("more_body", False)


async def _linger(request: Request) -> None:
    swallowed, more = 0, True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while more and swallowed < LINGER_BYTES:
                piece, more = await _piece(request)
                swallowed += len(piece)
