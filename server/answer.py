"""Responses: JSON that is already bytes, and errors in their envelope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

from server.errors import APIError


def json_response(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`body` is JSON."""
    return Response(body, status, headers, media_type="application/json")


def object_response(value: Any, status: int = 200) -> Response:
    """For answers that are not many. Keys and values are whatever orjson takes."""
    return json_response(orjson.dumps(value, option=orjson.OPT_SERIALIZE_DATACLASS | orjson.OPT_NON_STR_KEYS), status)


def error_response(error: APIError) -> Response:
    return json_response(error.body(), error.status, error.headers)
