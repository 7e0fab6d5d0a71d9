"""Every error a client can get, and the one envelope it comes in.

    APIError                    500 server_error
    ├── InvalidRequest          400 invalid_request_error   `param` names the field
    │   ├── UnsupportedField    400 unsupported_parameter   known, and refused by name
    │   ├── ContextOverflow     400 context_length_exceeded both numbers in the message
    │   ├── InvalidKey          401 invalid_api_key         with WWW-Authenticate
    │   ├── NotFound            404 not_found
    │   │   └── ModelNotFound   404 model_not_found
    │   ├── MethodNotAllowed    405 method_not_allowed      with Allow
    │   ├── BodyTooSlow         408 request_timeout
    │   └── BodyTooLarge        413 request_too_large
    ├── InternalError           500 internal_error          never a stack trace
    ├── Unavailable             503 service_unavailable     with Retry-After
    │   └── Overloaded          429 rate_limit_exceeded     with Retry-After
    └── DeadlineExceeded        504 deadline_exceeded       the client's or the operator's limit on a request

The body is always `{"error": {"message", "type", "param", "code"}}`, also for the framework's own refusals and for the
data event of a stream that breaks; under /v1/messages it is Anthropic's. Messages are bounded. Knows nothing of routes
or of the engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import orjson

MAX_MESSAGE_CHARS = 1000
MAX_SHOWN_CHARS = 60

# How pydantic begins a complaint, and what else of its wording means little to a client.
_PYDANTIC_SUBJECT = re.compile(r"^(Input|String|Value|List|Dictionary) should ")
_PYDANTIC_WORDS = (
    (re.compile(r"a valid dictionary( or instance of \w+)?"), "an object"),
    (re.compile(r"a valid integer"), "a whole number"),
    (re.compile(r"a valid (list|string|number|boolean)"), r"a \1"),
    (re.compile(r"be None$"), "be null"),
    (re.compile(r"^Field required$"), "is required"),
    (re.compile(r"^Extra inputs are not permitted$"), "is not known"),
    (re.compile(r"( after validation, not|, unable to) .*"), ""),
    (re.compile(r"^Unable to parse input string as an integer.*"), "must be a whole number of fewer digits"),
)

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class APIError(Exception):
    """An error with everything its answer needs."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str] = "internal_error"

    def __init_subclass__(cls, *, code: str, status: int | None = None, type: str | None = None) -> None:
        cls.default_code, cls.status, cls.type = code, status or cls.status, type or cls.type

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = bounded(message, MAX_MESSAGE_CHARS)
        self.param = param
        self.code = code or self.default_code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        return orjson.dumps(
            {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
        )

    def anthropic_body(self, request_id: str) -> bytes:
        """The same in the form that Anthropic's API has for it."""
        error = {"type": _ANTHROPIC_TYPES.get(self.status, "invalid_request_error"), "message": self.message}
        return orjson.dumps({"type": "error", "error": error, "request_id": request_id})


class InvalidRequest(APIError, status=400, type="invalid_request_error", code="invalid_value"): ...  # noqa: N818


class UnsupportedField(InvalidRequest, code="unsupported_parameter"): ...


class ContextOverflow(InvalidRequest, code="context_length_exceeded"): ...


class InvalidKey(InvalidRequest, status=401, code="invalid_api_key"):
    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"www-authenticate": "Bearer"})


class NotFound(InvalidRequest, status=404, code="not_found"): ...


class ModelNotFound(NotFound, code="model_not_found"):
    def __init__(self, name: str) -> None:
        super().__init__(
            f"The model {shown(name)} does not exist here; GET /v1/models lists those that do.", param="model"
        )


class MethodNotAllowed(InvalidRequest, status=405, code="method_not_allowed"): ...


class BodyTooSlow(InvalidRequest, status=408, code="request_timeout"): ...


class BodyTooLarge(InvalidRequest, status=413, code="request_too_large"): ...


class InternalError(APIError, code="internal_error"):
    def __init__(self, message: str = "The server failed while handling the request.") -> None:
        super().__init__(message)


class Unavailable(APIError, status=503, code="service_unavailable"):  # noqa: N818
    def __init__(self, message: str, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message, headers={"retry-after": str(max(1, round(retry_after_seconds)))})


class Overloaded(Unavailable, status=429, type="rate_limit_error", code="rate_limit_exceeded"): ...


class DeadlineExceeded(APIError, status=504, code="deadline_exceeded"):  # noqa: N818
    def __init__(self) -> None:
        super().__init__("The request was not answered in the time it was given.")


def wrong(param: str, problem: str, code: str | None = None) -> InvalidRequest:
    """A field that cannot be as it is; `problem` goes on from its name."""
    return InvalidRequest(f"'{param}' {problem}.", param=param, code=code)


def unsupported(param: str, problem: str) -> UnsupportedField:
    return UnsupportedField(f"'{param}' {problem}.", param=param)


def missing(param: str) -> InvalidRequest:
    return wrong(param, "is required", "missing_required_parameter")


def bounded(text: str, limit: int) -> str:
    """`text` cut to `limit` characters, fit to be sent as UTF-8."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shown(value: object) -> str:
    """A client's value as it may appear in a message: short whatever its size."""
    if isinstance(value, str):
        return repr(bounded(value, MAX_SHOWN_CHARS))
    if isinstance(value, list | dict):
        return "an object" if isinstance(value, dict) else "a list" if value else "an empty list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return bounded(repr(value), MAX_SHOWN_CHARS)


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """What is refused inside gets the field paths that the client knows; `names` are patterns of paths."""

    def known(path: str) -> str:
        for pattern, replacement in names.items():
            path = re.sub(pattern, replacement, path)
        return path

    try:
        yield
    except InvalidRequest as error:
        error.message = re.sub(r"(?<=')[a-z][^']*(?=')", lambda path: known(path[0]), error.message)
        error.param = error.param and known(error.param)
        raise


def field_path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "content")` -> `messages[0].content`."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def in_our_words(complaint: str) -> str:
    """One of pydantic's complaints, to go on from the field's name."""
    complaint = _PYDANTIC_SUBJECT.sub("must ", complaint)
    for pattern, replacement in _PYDANTIC_WORDS:
        complaint = pattern.sub(replacement, complaint)
    return complaint


def from_validation(details: Sequence[Mapping[str, Any]], place: int = 0) -> InvalidRequest:
    """The first of pydantic's complaints, in our words. The field's path begins at `place` of their locations."""
    first = details[0]
    param = bounded(field_path(tuple(first["loc"][place:])), MAX_SHOWN_CHARS)
    if first["type"] == "missing":
        return missing(param)
    wanted = in_our_words(first["msg"])
    if wanted.startswith("must be ") and wanted != first["msg"]:
        wanted += f", not {shown(first['input'])}"
    more = f" ({len(details) - 1} more fields are wrong.)" if len(details) > 1 else ""
    code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    return InvalidRequest(f"'{param}' {wanted}.{more}", param=param, code=code)
