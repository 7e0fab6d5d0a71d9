"""Every way the scheduler says no. It knows the numbers, not how they are worded for a client.

SchedulerError
├── Refused                at submit: nothing of the group was queued
│   ├── NeverFits          too long for the context or for the whole pool, whatever the load
│   ├── QueueFull          come back after `retry_after_seconds`
│   ├── NotAccepting       draining, stopped or unhealthy
│   └── DuplicateRequest   an id that is still in use
└── RequestFailed          after submit: comes as the `error` of an Update
    ├── NonFiniteLogits    the model gave infinities or NaN for this request's row
    ├── NothingAllowed     no token was both allowed by the request's constraint and possible
    ├── ConstraintFailed   raised by a constraint that cannot go on
    ├── OutOfPages         alone in the pool, and still without room
    ├── StepFailed         the step it was part of raised
    ├── SequenceFailed     handling this request's own part of a step raised
    └── Interrupted        the engine was stopped, or gave up, before the request was done
"""

from __future__ import annotations


class SchedulerError(Exception):
    """Base of everything below."""


class Refused(SchedulerError):  # noqa: N818
    """Not accepted; nothing was queued."""


class NeverFits(Refused):
    """A prompt that leaves no room for one generated token."""

    def __init__(self, request_id: str, prompt_tokens: int, limit_tokens: int, limited_by: str) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.limit_tokens = limit_tokens
        self.limited_by = limited_by  # "max_model_len" or "kv_pool"
        super().__init__(
            f"request {request_id} has {prompt_tokens} prompt tokens and needs room for one more, "
            f"but {limited_by} allows {limit_tokens}"
        )


class QueueFull(Refused):
    """The waiting queue has no room for the group."""

    def __init__(self, waiting: int, limit: float, unit: str, retry_after_seconds: float) -> None:
        self.waiting = waiting
        self.limit = limit
        self.unit = unit  # "requests" (choices counted one by one), "tokens", "share" (the owner's), or "seconds"
        self.retry_after_seconds = retry_after_seconds
        super().__init__(
            f"{waiting} {unit} are waiting and the limit is {limit}; try again in {retry_after_seconds:.0f} s"
        )


class NotAccepting(Refused):
    """The engine takes no new requests."""


class DuplicateRequest(Refused):
    """The id belongs to a request that has not ended."""


class RequestFailed(SchedulerError):  # noqa: N818
    """An accepted request ended without being finished."""


class NonFiniteLogits(RequestFailed):
    """The model's output for this request was not a number."""


class NothingAllowed(RequestFailed):
    """The constraint and the rest of what the request asks for leave no token to choose."""

    def __init__(self) -> None:
        super().__init__("no token that the constraint allows had a finite logit")


class ConstraintFailed(RequestFailed):
    """For constraints to raise: following them has become too costly."""


class OutOfPages(RequestFailed):
    """No eviction and no preemption could make room."""


class StepFailed(RequestFailed):
    """The model raised during a step this request took part in."""


class SequenceFailed(RequestFailed):
    """An error confined to this request."""


class Interrupted(RequestFailed):
    """The engine ended first."""
