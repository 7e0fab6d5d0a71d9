"""The HTTP application: routes, and the layers around them.

    Edge (request id, last resort for errors)
      KeyGuard (API keys)
        routes

All layers are plain ASGI: nothing buffers a stream or hides that its client has left.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import Response

from server.answer import error_response
from server.auth import OPEN_PATHS, KeyGuard
from server.edge import Edge
from server.errors import APIError, InvalidRequest, MethodNotAllowed, NotFound, field_path, shown
from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import CompletionRequest
from server.routes import chat, completions, health, info, models
from server.state import ServerState

BODIES = (CompletionRequest, ChatCompletionRequest)


class Application(FastAPI):
    """FastAPI, with the bodies that routes read by themselves in its OpenAPI description."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            description = super().openapi()
            _, definitions = models_json_schema(
                [(body, "validation") for body in BODIES], ref_template="#/components/schemas/{model}"
            )
            description.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        return super().openapi()


def create_app(state: ServerState) -> FastAPI:
    """The application for a loaded model. The engine's life is its owner's business, not the application's."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.tokenizing.warm_up()
        yield
        state.tokenizing.close()

    app = Application(
        title="Octavo",
        version=state.version,
        docs_url=None,  # the pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # a path that is nearly right is a 404, not a detour around the API key
        lifespan=lifespan,
    )
    for module in (completions, chat, models, health, info):
        app.include_router(module.router(state))
    app.add_exception_handler(APIError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _bad_query)
    app.add_middleware(
        KeyGuard, keys=state.api_keys, open_paths=OPEN_PATHS | ({"/metrics"} if state.open_metrics else set())
    )
    app.add_middleware(Edge, metrics=state.metrics)
    state.metrics.watch(state.engine)
    return app


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """The router's own refusals, in our envelope."""
    assert isinstance(error, HTTPException)
    where = shown(request.url.path)
    if error.status_code == 404:
        return error_response(NotFound(f"There is nothing at {where}."))
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        answer = MethodNotAllowed(f"{where} does not take {shown(request.method)}, only {allowed}.")
        answer.headers["allow"] = allowed
        return error_response(answer)
    return error_response(InvalidRequest(str(error.detail)))


async def _bad_query(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = field_path(tuple(first["loc"][1:]))
    return error_response(InvalidRequest(f"'{param}': {first['msg']}.", param=param))
