"""What every route that generates does with its body before and its answer after."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive

from scheduler.request import Request as EngineRequest
from server.answer import json_response
from server.body import read_json
from server.choice import Echo, TextOptions
from server.errors import InvalidRequest, bounded, wrong
from server.exchange import current
from server.generation import ClientGone, Generation
from server.protocol.checks import printable, read, unknown_field, unknown_inside
from server.protocol.fields import Fields, GenerationFields
from server.refusals import refusing
from server.state import ServerState
from server.streaming import AnswerWriter, EventStream, collected, left
from server.structured.constraint import GrammarConstraint
from server.structured.grammar import Grammar

IGNORED_HEADER = "x-octavo-ignored"
CLIENT_CLOSED = 499  # nginx's number for it; nobody is there to read it

T = TypeVar("T", bound=Fields)


async def parsed(request: Request, state: ServerState, model: type[T]) -> tuple[T, dict[str, str]]:
    """The body, validated as far as its types say, and the headers that its answer gets."""
    return validated(request, state, await read_json(request, state.max_body_bytes), model)


def validated(request: Request, state: ServerState, body: dict[str, Any], model: type[T]) -> tuple[T, dict[str, str]]:
    """What `parsed` makes of a body that has been read."""
    fields, ignored = read(body, model)
    ignored += unknown_inside(fields)
    if ignored and state.limits.strict_fields:
        raise unknown_field(ignored[0])
    state.require_model(fields.model)  # type: ignore[attr-defined]  # every body names one
    # Where the route has no such field it is one of those that are ignored.
    request_id = getattr(fields, "request_id", None) if "request_id" in model.model_fields else None
    if request_id is not None and printable(request_id):
        request.state.request_id = request_id
    names = [bounded(name, 40) for name in ignored if printable(name)][:20]
    return fields, {IGNORED_HEADER: ",".join(names)} if names else {}


def check_room(state: ServerState, fields: GenerationFields, n: int, prompts: int = 1) -> None:
    """Refuse what could not be queued now whatever its prompts are, before any work goes into them: in an overload
    that work is what the answers of others would wait for.

    Raises an APIError: what `generation` would, or a 400 for more choices than can ever be taken.
    """
    limits, choices = state.engine.limits, n * prompts
    param = "best_of" if getattr(fields, "best_of", None) else "n" if n > 1 else "prompt"
    most = limits.max_num_seqs + limits.max_queued_requests
    if choices > most:
        raise InvalidRequest(f"The request asks for {choices} choices, and at most {most} can be taken.", param=param)
    with refusing(state.metrics):
        state.key_limits.admit(state.owner(), choices, param)
        state.engine.check_room(state.owner(), choices, fields.priority or 0)


def text_options(fields: GenerationFields, *, logprobs: bool) -> TextOptions:
    return TextOptions(
        stops=tuple(fields.stop or ()),
        include_stop=bool(fields.include_stop_str_in_output),
        skip_special=fields.skip_special_tokens is not False,
        min_tokens=fields.min_tokens or 0,
        stop_token_ids=frozenset(fields.stop_token_ids or ()),
        logprobs=logprobs,
    )


async def raw_prompts(
    state: ServerState, prompts: Sequence[str | list[int]], add_special_tokens: bool | None, *, truncates: bool
) -> list[list[int]]:
    """The ids of prompts without a template. Raises ContextOverflow unless they are cut later."""

    def ids_of(prompt: str | list[int]) -> list[int]:
        special = add_special_tokens is not False
        if isinstance(prompt, list):
            return prompt
        return state.tokenizing.encode(prompt, add_special_tokens=special, truncates=truncates)

    return await state.tokenizing.run(lambda: list(map(ids_of, prompts)))


async def bad_words(state: ServerState, fields: GenerationFields) -> tuple[tuple[int, ...], ...]:
    """The token runs that a request does not want to see."""
    if not fields.bad_words:
        return ()
    return await state.tokenizing.run(state.tokenizing.bad_words, fields.bad_words)


async def compiled(state: ServerState, grammar: Grammar | None, receive: Receive) -> GrammarConstraint | None:
    """What is to be followed; None when nothing is.

    Raises what `GrammarCompiler.compile` does, and ClientGone as soon as the client has left.
    """
    if grammar is None:
        return None
    work = asyncio.create_task(state.grammars.compile(grammar))
    leaving = asyncio.create_task(left(receive))
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientGone
        return work.result()
    finally:
        work.cancel()
        leaving.cancel()


def generation(
    state: ServerState, requests: Sequence[EngineRequest], options: TextOptions, echoes: Sequence[Echo] = ()
) -> Generation:
    """Hand the requests to the engine. Raises an APIError when it refuses."""
    if requests[0].constraint is not None and requests[0].params.allowed_token_ids is not None:
        raise wrong("allowed_token_ids", "and an answer kept to a form exclude each other")
    owner = state.owner()
    with refusing(state.metrics):
        spend = state.key_limits.admit(owner, sum(request.n for request in requests), "n")
    if state.log_prompts and (exchange := current.get()) is not None:
        text_of = partial(state.tokenizing.decoding.text_of, skip_special=False)
        exchange.prompts = [text_of(request.prompt.tolist()) for request in requests]
    namespaced = [replace(request, namespace=state.namespace(request.namespace), owner=owner) for request in requests]
    return Generation(state, namespaced, options, echoes, spend)


async def answered(
    request: Request,
    state: ServerState,
    work: Generation,
    writer: AnswerWriter,
    headers: Mapping[str, str],
    *,
    stream: bool | None,
) -> Response:
    """The answer, streamed or whole. Raises APIError and ClientGone."""
    if stream:
        return EventStream(work, writer, state.keep_alive_seconds, headers)
    return json_response(writer.whole(await collected(work, request.receive)), headers=headers)


def body_of(*models: type[Fields]) -> dict[str, object]:
    """The body in the OpenAPI description, one of several if need be; the route itself reads it as bytes."""
    references = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in models]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
