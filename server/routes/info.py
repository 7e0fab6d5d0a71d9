"""What an operator may ask: `GET /info` for the resolved plan, `/debug/requests` for the lives of requests,
`/debug/steps` for what the scheduler did."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import Response

from scheduler.journal import DraftNote, RequestLife
from server.answer import object_response
from server.errors import NotFound, shown
from server.state import ServerState

Limit = Annotated[int, Query(ge=1, le=1000)]


def router(state: ServerState) -> APIRouter:
    routes = APIRouter()

    @routes.get("/info")
    async def info() -> Response:
        return object_response(state.info)

    @routes.get("/debug/requests")
    async def requests(limit: Limit = 50) -> Response:
        return object_response(
            {"requests": [_summary(life, state.clock()) for life in islice(state.engine.journal.lives(), limit)]}
        )

    @routes.get("/debug/requests/{request_id}")
    async def request(request_id: str) -> Response:
        life = state.engine.journal.life(request_id)
        if life is None:
            raise NotFound(f"No current or recent request has the id {shown(request_id)}.", param="request_id")
        return object_response(
            {
                **_summary(life, state.clock()),
                "events": [_event(life, event) for event in life.events],
                "drafts": [_draft(life, draft) for draft in life.drafts],
            }
        )

    @routes.get("/debug/steps")
    async def steps(limit: Limit = 50, after: Annotated[int, Query(ge=0)] = 0) -> Response:
        steps = [step for step in state.engine.journal.steps if step.number > after]
        return object_response({"steps": steps[-limit:]})

    return routes


def _summary(life: RequestLife, now: float) -> dict[str, Any]:
    """A life with times in seconds since its arrival."""

    def since(moment: float | None) -> float | None:
        return None if moment is None else round(moment - life.arrival, 6)

    return {
        "id": life.id,
        "prompt_tokens": life.prompt_tokens,
        "cached_tokens": life.cached_tokens,
        "output_tokens": life.output_tokens,
        "n": life.n,
        "priority": life.priority,
        "preemptions": life.preemptions,
        "drafted_tokens": life.drafted_tokens,
        "accepted_tokens": life.accepted_tokens,
        "age_seconds": since(now),
        "admitted_after_seconds": since(life.admitted_at),
        "first_token_after_seconds": since(life.first_token_at),
        "finished_after_seconds": since(life.finished_at),
        "finish_reasons": life.finish_reasons,
        "error": life.error,
        "dropped_events": life.dropped_events,
    }


def _draft(life: RequestLife, draft: DraftNote) -> dict[str, Any]:
    """Its candidates as token ids, and how many tokens of the best one became output."""
    after = round(draft.time - life.arrival, 6)
    return {"after_seconds": after, "choice": draft.choice, "paths": draft.paths, "accepted": draft.accepted}


def _event(life: RequestLife, event: Any) -> dict[str, Any]:
    after = round(event.time - life.arrival, 6)
    return {"after_seconds": after, "kind": event.kind, "choice": event.choice, **event.detail}
