"""The application's OpenAPI description: what FastAPI knows of the routes, and the bodies that routes read by
themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from server.protocol.fields import Fields


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """OpenAI's envelope of every error."""

    error: ErrorDetail


_ERROR = {
    "description": "an error",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}
# Pydantic's words for limits behind a validator of our own.
_KEYWORDS = {"ge": "minimum", "le": "maximum"}


class DescribedApplication(FastAPI):
    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            description = super().openapi()
            bodies: list[type[BaseModel]] = [Error, *_kinds(Fields)]
            _, definitions = models_json_schema(
                [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
            )
            description["components"] = {"schemas": _standard(definitions["$defs"])}
            for path, operations in description["paths"].items():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
                    if not path.startswith("/v1/messages"):
                        operation["responses"]["default"] = _ERROR
        return super().openapi()


def _kinds(base: type[Fields]) -> Iterator[type[Fields]]:
    """All that is read from a body, whichever route it belongs to."""
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)


def _standard(value: Any) -> Any:
    """A schema in JSON Schema's own keywords."""
    if isinstance(value, list):
        return [_standard(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {_KEYWORDS.get(name, name): _standard(item) for name, item in value.items()}
