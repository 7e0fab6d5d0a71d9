"""A grammar compiled for a client that may leave meanwhile."""

from __future__ import annotations

import asyncio

from starlette.types import Receive

from server.generation import ClientGone
from server.structured.compiler import GrammarCompiler
from server.structured.constraint import GrammarConstraint
from server.structured.grammar import Grammar


async def compiled(grammars: GrammarCompiler, grammar: Grammar | None, receive: Receive) -> GrammarConstraint | None:
    """What is to be followed; None when nothing is.

    Raises what `GrammarCompiler.compile` does, and ClientGone as soon as the client has left. The request's body must
    have been read from `receive`.
    """
    if grammar is None:
        return None
    work = asyncio.create_task(grammars.compile(grammar))
    leaving = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientGone
        return work.result()
    finally:
        work.cancel()
        leaving.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
