"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from server.answer import object_response
from server.state import ServerState


def router(state: ServerState) -> APIRouter:
    routes = APIRouter()

    @routes.get("/v1/models")
    async def models() -> Response:
        return object_response({"object": "list", "data": [_model(state, name) for name in state.model_names]})

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        state.require_model(name)
        return object_response(_model(state, name))

    return routes


def _model(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "octavo",
        "root": state.model_names[0],
        "parent": None,
        "max_model_len": state.limits.max_model_len,
    }
