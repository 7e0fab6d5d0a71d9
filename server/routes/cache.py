"""The prefix cache in the operator's hands.

`/v1/cache/prefixes` pins prefixes; `/v1/cache/reset`, `save` and `load` are for admins; `GET /debug/cache` shows what
is there and what went."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from kvstore.errors import SavedCacheError
from kvstore.store import KVStore, Pin
from models.sampling import SamplingParams
from scheduler.errors import Refused
from scheduler.request import Request as EngineRequest
from server.answer import object_response
from server.auth import caller
from server.body import read_json
from server.conversing import prompt_of
from server.errors import InvalidRequest, NotFound, Unavailable, shown
from server.page_map import page_map
from server.protocol.chat import ChatCompletionRequest
from server.protocol.checks import check_ids
from server.protocol.completions import PrefixRequest
from server.refusals import failure, refusal
from server.replies.head import new_id
from server.routes.generating import body_of, raw_prompts, validated
from server.routes.query import Limit, refuse_other
from server.saved_cache import SavedCache
from server.state import ServerState

TRIES = 3  # to pin what was just computed: others may have evicted it


@dataclass(frozen=True, slots=True)
class Pinned:
    """A prefix that somebody has registered."""

    pin: Pin
    tokens: bytes
    namespace: Hashable
    owner: str  # the caller's key, under isolation
    created: int = field(default_factory=lambda: int(time.time()))

    def shown(self, prefix_id: str, kv: KVStore) -> dict[str, Any]:
        last = self.pin.last_hit
        return {
            "id": prefix_id,
            "object": "cache.prefix",
            "created": self.created,
            "tokens": self.pin.length,  # whole pages only
            "pages": self.pin.length // kv.page_size,
            "hits": self.pin.hits,
            "last_hit_seconds_ago": None if last is None else round(time.monotonic() - last, 3),
        }


def router(state: ServerState) -> APIRouter:
    routes = APIRouter()
    kv = state.engine.kv
    pinned: dict[str, Pinned] = {}

    def own() -> dict[str, Pinned]:
        """Those that the caller may see."""
        return {id: one for id, one in pinned.items() if not state.isolates_keys or one.owner == caller.get()}

    @routes.post("/v1/cache/prefixes", openapi_extra=body_of(PrefixRequest, ChatCompletionRequest))
    async def register(request: Request) -> Response:
        body = await read_json(request, state.max_body_bytes)
        body = {"model": state.model_names[0], **body}
        if body.get("messages") is not None:
            chat, headers = validated(request, state, {"add_generation_prompt": False, **body}, ChatCompletionRequest)
            tokens, salt = await prompt_of(state, chat), chat.cache_salt
        else:
            text, headers = validated(request, state, body, PrefixRequest)
            if isinstance(text.prompt, list):
                check_ids(text.prompt, "prompt", state.limits)
            [tokens] = await raw_prompts(state, [text.prompt], text.add_special_tokens, truncates=False)
            salt = text.cache_salt
        prompt, namespace = np.array(tokens, np.int32), state.namespace(salt)
        for prefix_id, one in own().items():
            if (one.tokens, one.namespace) == (prompt.tobytes(), namespace):
                return object_response(one.shown(prefix_id, kv), headers=headers)
        one = Pinned(await _pin(state, prompt, namespace), prompt.tobytes(), namespace, caller.get())
        prefix_id = new_id("prefix")
        pinned[prefix_id] = one
        return object_response(one.shown(prefix_id, kv), headers=headers)

    @routes.get("/v1/cache/prefixes")
    async def prefixes() -> Response:
        return object_response({"object": "list", "data": [one.shown(id, kv) for id, one in own().items()]})

    @routes.delete("/v1/cache/prefixes/{prefix_id}")
    async def drop(prefix_id: str) -> Response:
        if prefix_id not in own():
            raise NotFound(f"No registered prefix has the id {shown(prefix_id)}.", param="prefix_id")
        state.engine.unpin(pinned.pop(prefix_id).pin)
        return object_response({"id": prefix_id, "object": "cache.prefix.deleted", "deleted": True})

    @routes.post("/v1/cache/reset")
    async def reset() -> Response:
        return object_response({"freed_pages": state.engine.reset_cache()})

    async def moved(move: Callable[[SavedCache], int]) -> Response:
        cache = state.saved_cache
        if cache is None:
            raise InvalidRequest("The server was started without --kv-cache-dir.")
        try:
            pages = await state.engine.between_steps(lambda: move(cache))
        except (SavedCacheError, OSError) as error:
            raise InvalidRequest(f"{cache.path}: {error}") from None
        except Refused as error:
            raise refusal(error) from None
        return object_response({"pages": pages, "file": str(cache.path)})

    @routes.post("/v1/cache/save")
    async def save() -> Response:
        return await moved(SavedCache.save)

    @routes.post("/v1/cache/load")
    async def load() -> Response:
        return await moved(SavedCache.load)

    @routes.get("/debug/cache")
    async def cache(request: Request, limit: Limit = 50, cells: Annotated[int, Query(ge=0, le=4096)] = 0) -> Response:
        refuse_other(request, "limit", "cells")
        return object_response(cache_view(state, limit, cells))

    return routes


async def _pin(state: ServerState, prompt: Any, namespace: Hashable) -> Pin:
    """Compute a prefix, where it is not cached, and pin its whole pages. Raises an APIError."""
    engine, kv = state.engine, state.engine.kv
    if len(prompt) < kv.page_size:
        raise InvalidRequest(f"The prefix has {len(prompt)} tokens, and a page has {kv.page_size}.", param="prompt")
    _check_room(kv, prompt)
    params = SamplingParams(seed=0, temperature=0.0, max_tokens=1, ignore_eos=True)
    for _ in range(TRIES):
        request = EngineRequest(new_id("prefix"), prompt, params, namespace=namespace, owner=state.owner())
        spend = state.key_limits.admit(request.owner, 1, "prompt")
        try:
            [stream] = engine.submit([request])
            spend(len(prompt))
        except Refused as error:
            raise refusal(error) from None
        async for update in stream:
            if update.error is not None:
                raise failure(update.error)
        _check_room(kv, prompt)  # again: others have pinned theirs meanwhile
        pin = engine.pin(prompt, namespace)
        if pin is not None and pin.length == len(prompt) // kv.page_size * kv.page_size:
            return pin
        if pin is not None:
            engine.unpin(pin)
    raise Unavailable("The prefix was evicted before it could be pinned: the KV cache is too busy.")


def _check_room(kv: KVStore, prompt: Any) -> None:
    if len(prompt) > (room := kv.pin_room()):
        raise InvalidRequest(
            f"The prefix has {len(prompt)} tokens, and {room} more can be pinned: all pins may hold half of the KV "
            f"pool and leave one full context of {kv.max_model_len}.",
            param="prompt",
        )


def cache_view(state: ServerState, limit: int, cells: int) -> dict[str, Any]:
    """The store for people: at most `limit` of what there may be many of, and `cells` for its pages."""
    kv = state.engine.kv
    nodes = [] if kv.tree is None else list(islice(kv.tree.by_use(), limit))
    numbers = {node: number for number, node in enumerate(nodes)}
    owners = [(one, one.kv) for one in state.engine.sequences if one.kv is not None and min(one.kv.blocks)][:limit]
    tier = kv.tier
    return {
        "page_size": kv.page_size,
        "pages": asdict(kv.stats()),
        "map": page_map(kv, [pages for _, pages in owners], cells) if cells else None,
        "owners": [
            {"request": one.request.id, "choice": one.index, "tokens": one.computed, "pages": min(pages.blocks)}
            for one, pages in owners
        ],
        "pinned_tokens": [pin.length for pin in kv.pins][:limit],
        "tree": [
            {
                "parent": None if node.parent is None else numbers.get(node.parent),  # its place in this list
                "namespace": node.namespace,
                "positions": [node.start, node.end],
                "first_tokens": node.tokens[:8].tolist(),
                "pages": [int(run.size) for run in node.pages],
                "locks": node.locks,
                "last_used": node.last_used,  # as the `tick` of an eviction
            }
            for node in nodes
        ],
        "evictions": [asdict(eviction) for eviction in kv.evictions()[-limit:]],
        "second_tier": None
        if tier is None
        else {
            "pages": len(tier.memory),
            "used": tier.used,
            **tier.counts,
            "store_page_seconds": tier.costs.store_page,
            "load_page_seconds": tier.costs.load_page,
            "compute_page_seconds": tier.costs.compute_token * tier.page_size,
        },
    }
