"""Responses: JSON that is already bytes, and errors in the envelope that clients of the path's API expect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.errors import APIError
from server.exchange import note_error

ANTHROPIC_PATH = "/v1/messages"


def json_response(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`body` is JSON."""
    return Response(body, status, headers, media_type="application/json")


def object_response(value: Any, headers: Mapping[str, str] | None = None) -> Response:
    """For answers that are not many. Keys and values are whatever orjson takes."""
    options = orjson.OPT_SERIALIZE_DATACLASS | orjson.OPT_NON_STR_KEYS
    return json_response(orjson.dumps(value, option=options), headers=headers)


class ErrorResponse(Response):
    """An error, in Anthropic's form under Anthropic's path and in OpenAI's everywhere else."""

    def __init__(self, error: APIError) -> None:
        self.status_code = error.status
        self.background = None
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error
        note_error(error.code)
        theirs = scope["path"].startswith(ANTHROPIC_PATH)
        body = error.anthropic_body(scope["state"]["request_id"]) if theirs else error.body()
        await json_response(body, error.status, error.headers)(scope, receive, send)
