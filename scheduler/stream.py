"""What a request's reader gets: updates, merged when the reader is slow.

The engine's task writes, one reader task iterates; both on the event loop. A stream holds at most one unread update per
choice, so a reader that stalls costs no more memory than the tokens themselves.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import NamedTuple

from scheduler.errors import SchedulerError
from scheduler.request import FinishReason


class TokenLogprob(NamedTuple):
    """The log-probability of one token and of its likeliest alternatives, natural logs, most likely first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Update:
    """What happened to one choice since its last update. The one with a `finish_reason` is its last."""

    index: int
    tokens: tuple[int, ...] = ()  # without the stop token
    logprobs: tuple[TokenLogprob, ...] | None = None  # one for each of `tokens`; None when not asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # choice 0 only: the next prompt tokens in order, from the second on
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the eos or stop token id that ended the choice; generated, so it counts as output
    cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    accepted_tokens: int = 0  # with a finish reason: tokens of this choice that were drafted, and right
    rejected_tokens: int = 0  # and wrong
    error: SchedulerError | None = None  # with finish_reason "error"


class _Pending:
    """An update in the making."""

    __slots__ = (
        "cached_tokens",
        "drafts",
        "error",
        "finish_reason",
        "logprobs",
        "prompt_logprobs",
        "stop_token",
        "tokens",
    )

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None
        self.prompt_logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.stop_token: int | None = None
        self.cached_tokens = 0
        self.error: SchedulerError | None = None
        self.drafts = (0, 0)


class RequestStream:
    """Async iterator over the updates of all choices of a request; ends when every choice has finished."""

    def __init__(self, request_id: str, n: int) -> None:
        self.request_id = request_id
        self._unfinished = n
        self._pending: dict[int, _Pending] = {}
        self._reader: asyncio.Future[None] | None = None

    def put_token(self, index: int, token: int, logprob: TokenLogprob | None, cached_tokens: int) -> None:
        """Add a generated token to the choice's next update."""
        pending = self._open(index)
        pending.tokens.append(token)
        pending.cached_tokens = cached_tokens
        if logprob is not None:
            if pending.logprobs is None:
                pending.logprobs = []
            pending.logprobs.append(logprob)

    def put_prompt_logprobs(self, index: int, logprobs: list[TokenLogprob]) -> None:
        """Add the logprobs of the next prompt tokens."""
        self._open(index).prompt_logprobs += logprobs

    def finish(
        self,
        index: int,
        reason: FinishReason,
        *,
        cached_tokens: int,
        stop_token: int | None = None,
        error: SchedulerError | None = None,
        drafts: tuple[int, int] = (0, 0),
    ) -> None:
        """The choice has ended: its next update is its last. `drafts` are the tokens accepted and rejected."""
        pending = self._open(index)
        pending.finish_reason = reason
        pending.cached_tokens = cached_tokens
        pending.stop_token = stop_token
        pending.error = error
        pending.drafts = drafts
        self._unfinished -= 1

    def _open(self, index: int) -> _Pending:
        pending = self._pending.get(index)
        if pending is None:
            pending = self._pending[index] = _Pending()
            if self._reader is not None:
                if not self._reader.done():
                    self._reader.set_result(None)
                self._reader = None
        return pending

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Update:
        while not self._pending:
            if self._unfinished == 0:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        index = next(iter(self._pending))
        pending = self._pending.pop(index)
        return Update(
            index,
            tuple(pending.tokens),
            None if pending.logprobs is None else tuple(pending.logprobs),
            tuple(pending.prompt_logprobs),
            pending.finish_reason,
            pending.stop_token,
            pending.cached_tokens,
            *pending.drafts,
            pending.error,
        )
