"""What a request's reader gets: updates, merged when the reader is slow.

The engine's task writes, one reader task iterates; both on the event loop. A stream holds at most one unread update per
choice, so a reader that stalls costs no more memory than the tokens themselves.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler.errors import SchedulerError
from scheduler.request import FinishReason


class TokenLogprob(NamedTuple):
    """The log-probability of one token and of its likeliest alternatives, natural logs, most likely first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Update:
    """What happened to one choice since its last update; the reader's own once it has it. The one with a
    `finish_reason` is its last."""

    index: int
    tokens: list[int] = field(default_factory=list)  # without the stop token
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one for each of `tokens`, where asked for
    prompt_logprobs: list[TokenLogprob] = field(
        default_factory=list
    )  # choice 0 only: the next tokens', from the second
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the eos or stop token id that ended the choice; generated, so it counts as output
    cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    accepted_tokens: int = 0  # with a finish reason: tokens of this choice that were drafted, and right
    rejected_tokens: int = 0  # and wrong
    error: SchedulerError | None = None  # with finish_reason "error"


class RequestStream:
    """Async iterator over the updates of all choices of a request; ends when every choice has finished."""

    def __init__(self, request_id: str, n: int) -> None:
        self.request_id = request_id
        self._unfinished = n
        self._pending: dict[int, Update] = {}
        self._reader: asyncio.Future[None] | None = None

    def put_token(self, index: int, token: int, logprob: TokenLogprob | None, cached_tokens: int) -> None:
        update = self._open(index)
        update.tokens.append(token)
        update.cached_tokens = cached_tokens
        if logprob is not None:
            update.logprobs.append(logprob)

    def put_prompt_logprobs(self, index: int, logprobs: list[TokenLogprob]) -> None:
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
        update = self._open(index)
        update.finish_reason = reason
        update.cached_tokens = cached_tokens
        update.stop_token = stop_token
        update.error = error
        update.accepted_tokens, update.rejected_tokens = drafts
        self._unfinished -= 1

    def _open(self, index: int) -> Update:
        update = self._pending.get(index)
        if update is None:
            update = self._pending[index] = Update(index)
            if self._reader is not None:
                if not self._reader.done():
                    self._reader.set_result(None)
                self._reader = None
        return update

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Update:
        while not self._pending:
            if self._unfinished == 0:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._pending.pop(next(iter(self._pending)))
