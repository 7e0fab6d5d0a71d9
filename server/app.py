"""The HTTP application: routes, and the layers around them.

    Edge (request id, deadline, last resort for errors)
      Origins (CORS, when there are allowed origins)
        KeyGuard (API keys)
          routes

All layers are plain ASGI: nothing buffers a stream or hides that its client has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from server.answer import ErrorResponse, json_response
from server.auth import OPEN_PATHS, KeyGuard
from server.description import DescribedApplication
from server.edge import Edge
from server.errors import APIError, InvalidRequest, MethodNotAllowed, NotFound, from_validation, shown
from server.generation import ClientGone
from server.routes import cache, chat, completions, info, page, responses
from server.routes.generating import CLIENT_CLOSED, IGNORED_HEADER
from server.state import ServerState

# What OpenAI's API has beside what a text model can do.
# fmt: off
UNSERVED = frozenset({
    "assistants", "audio", "batches", "containers", "conversations", "embeddings", "evals",
    "files", "fine_tuning", "images", "moderations", "realtime", "threads", "uploads", "vector_stores", "videos",
})
# fmt: on


class Origins(CORSMiddleware):
    """Answers browsers' preflights, which carry no key, before anybody asks for one."""

    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code == 200:
            return answer
        return ErrorResponse(InvalidRequest("This origin, method or header is not allowed.", code="cors_refused"))


def create_app(state: ServerState) -> FastAPI:
    """The application for a loaded model. The engine's life is its owner's business, not the application's."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, object]]:
        lag = asyncio.create_task(state.metrics.watch_loop(), name="loop lag")
        yield {"metrics": state.metrics}  # for `server.connection`, whose refusals no layer here sees
        lag.cancel()
        state.tokenizing.close()
        await state.grammars.close()

    app = DescribedApplication(
        title="Octavo",
        version=state.version,
        docs_url=None,  # the pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # a path that is nearly right is a 404, not a detour around the API key
        lifespan=lifespan,
    )
    for module in (completions, chat, responses, info, cache):
        app.include_router(module.router(state))
    app.include_router(page.router())
    app.add_exception_handler(APIError, _api_error)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _bad_query)
    app.add_middleware(
        KeyGuard,
        keys=state.keys,
        open_paths=OPEN_PATHS | page.PATHS | ({"/metrics"} if state.open_metrics else set()),
    )
    if state.allowed_origins:
        app.add_middleware(
            Origins,
            allow_origins=state.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", IGNORED_HEADER, "retry-after"],
        )
    app.add_middleware(Edge, metrics=state.metrics, timeout_seconds=state.request_timeout_seconds, tracer=state.tracer)
    state.metrics.watch(state.engine)
    return app


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return ErrorResponse(error)


async def _client_gone(_: Request, __: Exception) -> Response:
    """For a client that left before its request got to the engine."""
    return json_response(b"{}", CLIENT_CLOSED)


async def _http_error(request: Request, error: Exception) -> Response:
    """The router's own refusals, in our envelope."""
    assert isinstance(error, HTTPException)
    where = shown(request.url.path)
    if error.status_code == 404:
        if request.url.path.removeprefix("/v1/").partition("/")[0] in UNSERVED:
            return ErrorResponse(
                NotFound(f"{where} is not served: the model here only writes text.", code="not_served")
            )
        return ErrorResponse(NotFound(f"There is nothing at {where}."))
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        answer = MethodNotAllowed(f"{where} does not take {shown(request.method)}, only {allowed}.")
        answer.headers["allow"] = allowed
        return ErrorResponse(answer)
    return ErrorResponse(InvalidRequest(str(error.detail)))


async def _bad_query(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return ErrorResponse(from_validation(error.errors(), place=1))  # behind "query"
