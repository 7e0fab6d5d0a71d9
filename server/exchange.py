"""One HTTP request while it is answered: how long that may take, and what its log line and its trace will say.

Made by the outermost layer, filled by those inside, which find it in the context. Owned by the task that answers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.types import Scope

    from scheduler.journal import RequestLife


@dataclass(slots=True)
class Exchange:
    """A request and what became of it. `generation` says what was generated, in seconds and tokens."""

    scope: Scope
    began: float = field(default_factory=time.monotonic)
    deadline: float = math.inf  # the same clock's reading by which it has to be answered
    status: int | None = None  # of the response, once it has begun
    error: str | None = None  # the code of an error that was answered or sent in a stream
    key: str | None = None  # its API key's name
    generation: Mapping[str, Any] = field(default_factory=dict)
    lives: list[RequestLife] = field(default_factory=list)  # of the prompts, in the engine
    prompts: list[str] | None = None  # only when the operator wants to see them

    @property
    def request_id(self) -> str:
        """The client's own if it gave one."""
        request_id: str = self.scope["state"]["request_id"]
        return request_id


current: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


def note_error(code: str | None) -> None:
    """The request being answered ends in an error."""
    if (exchange := current.get()) is not None:
        exchange.error = code or "error"
