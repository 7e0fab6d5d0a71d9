"""`/health` (the process answers), `/ready` (it can serve), `/metrics` and `/version`. None does engine work."""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from server.answer import object_response
from server.errors import Unavailable
from server.state import ServerState


def router(state: ServerState) -> APIRouter:
    routes = APIRouter()

    async def health(_: Request) -> Response:
        return object_response({"status": "alive"})

    async def ready(_: Request) -> Response:
        reason = state.not_ready()
        if reason is not None:
            raise Unavailable(f"Not ready: {reason}.", retry_after_seconds=5)
        return object_response({"status": "ready", "running": state.engine.running, "waiting": state.engine.waiting})

    # Plain routes: probes may use HEAD, which these answer too.
    routes.add_route("/health", health, methods=["GET"])
    routes.add_route("/ready", ready, methods=["GET"])

    @routes.get("/metrics")
    async def metrics() -> Response:
        return Response(await state.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/version")
    async def version() -> Response:
        return object_response({"version": state.version})

    return routes
