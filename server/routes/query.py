"""What paths take in their query strings: the bound of a list, and nothing that is not known."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request

from server.errors import bounded, unsupported

Limit = Annotated[int, Query(ge=1, le=1000)]


def refuse_other(request: Request, *known: str) -> None:
    """Refuse parameters of the query that are not known. Raises UnsupportedField."""
    for name in request.query_params:
        if name not in known:
            raise unsupported(bounded(name, 60), "is no parameter of this path")
