"""The engine's errors as clients and metrics see them. Keeps nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from scheduler import errors as engine_errors
from server.errors import APIError, ContextOverflow, InternalError, InvalidRequest, Overloaded, Unavailable

if TYPE_CHECKING:
    from server.metrics import Metrics

_WAITING = {"share": "requests of your key", "seconds": "seconds of work"}


@contextmanager
def refusing(metrics: Metrics) -> Iterator[None]:
    """What is not queued inside is counted, and raised as clients see it."""
    try:
        yield
    except engine_errors.Refused as error:
        metrics.refuse(_refused_for(error))
        raise refusal(error) from error
    except Overloaded:
        metrics.refuse("key_limit")
        raise


def _refused_for(error: engine_errors.Refused) -> str:
    """A word for the metrics."""
    if isinstance(error, engine_errors.QueueFull):
        return f"queued_{error.unit}"
    return "too_long" if isinstance(error, engine_errors.NeverFits) else "not_accepting"


def refusal(error: engine_errors.Refused) -> APIError:
    """The engine's no, as a client sees it."""
    if isinstance(error, engine_errors.NeverFits):
        where = "context length" if error.limited_by == "max_model_len" else "KV cache"
        return ContextOverflow(
            f"This server's {where} holds at most {error.limit_tokens} tokens. However, your prompt has "
            f"{error.prompt_tokens} tokens, and at least one is needed for the answer. Please shorten it.",
            param="prompt",
        )
    if isinstance(error, engine_errors.QueueFull):
        waiting = f"{error.waiting} {_WAITING.get(error.unit, error.unit)} are waiting"
        return Overloaded(f"The server is busy: {waiting} and at most {error.limit} may.", error.retry_after_seconds)
    return Unavailable("The server is not taking new requests.")


def failure(error: engine_errors.SchedulerError) -> APIError:
    """What became of an accepted request, as a client sees it."""
    if isinstance(error, engine_errors.Interrupted):
        return Unavailable("The server stopped before the answer was complete.")
    if isinstance(error, engine_errors.ConstraintFailed | engine_errors.NothingAllowed):
        return InvalidRequest(f"The answer could not be kept to the format that was asked for: {error}.")
    if isinstance(error, engine_errors.NonFiniteLogits):
        return InternalError("The model's output for this request was not a number.")
    if isinstance(error, engine_errors.OutOfPages):
        return Unavailable("The KV cache has no room for an answer this long.")
    return InternalError()
