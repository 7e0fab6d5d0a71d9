"""What the server says of itself.

`/health` (the process answers), `/ready` (it can serve), `/metrics` and `/version`, none of which does engine work; the
models served; for operators `/info`, the resolved plan, `/debug/requests`, the lives of requests, and `/debug/steps`,
what the scheduler did.
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from scheduler.journal import RequestLife
from server.answer import object_response
from server.errors import NotFound, Unavailable, shown
from server.routes.query import Limit, refuse_other
from server.state import ServerState

SUMMARY = (
    "id", "prompt_tokens", "cached_tokens", "output_tokens", "n", "priority", "preemptions", "drafted_tokens",
    "accepted_tokens", "finish_reasons", "error", "dropped_events",
)  # fmt: skip


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

    @routes.get("/v1/models")
    async def models() -> Response:
        return object_response({"object": "list", "data": [_model(state, name) for name in state.model_names]})

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        state.require_model(name)
        return object_response(_model(state, name))

    @routes.get("/info")
    async def info() -> Response:
        return object_response(state.info)

    @routes.get("/debug/requests")
    async def requests(request: Request, limit: Limit = 50) -> Response:
        refuse_other(request, "limit")
        return object_response(
            {"requests": [_summary(life, state.clock()) for life in islice(state.engine.journal.lives(), limit)]}
        )

    @routes.get("/debug/requests/{request_id}")
    async def request(request: Request, request_id: str) -> Response:
        refuse_other(request)
        life = state.engine.journal.life(request_id)
        if life is None:
            raise NotFound(f"No current or recent request has the id {shown(request_id)}.", param="request_id")
        events = [
            {"after_seconds": _since(life, event.time), "kind": event.kind, "choice": event.choice, **event.detail}
            for event in life.events
        ]
        drafts = [  # candidates as token ids, and how many tokens of the best one became output
            {
                "after_seconds": _since(life, draft.time),
                "choice": draft.choice,
                "paths": draft.paths,
                "accepted": draft.accepted,
            }
            for draft in life.drafts
        ]
        return object_response({**_summary(life, state.clock()), "events": events, "drafts": drafts})

    @routes.get("/debug/steps")
    async def steps(request: Request, limit: Limit = 50, after: Annotated[int, Query(ge=0)] = 0) -> Response:
        refuse_other(request, "limit", "after")
        steps = [step for step in state.engine.journal.steps if step.number > after]
        return object_response({"steps": steps[-limit:]})

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


def _since(life: RequestLife, moment: float | None) -> float | None:
    return None if moment is None else round(moment - life.arrival, 6)


def _summary(life: RequestLife, now: float) -> dict[str, Any]:
    """A life with times in seconds since its arrival."""
    return {
        **{name: getattr(life, name) for name in SUMMARY},
        "age_seconds": _since(life, now),
        "admitted_after_seconds": _since(life, life.admitted_at),
        "first_token_after_seconds": _since(life, life.first_token_at),
        "finished_after_seconds": _since(life, life.finished_at),
    }
