"""One HTTP request's work in the engine: its prompts submitted together, their updates turned into deltas.

Owned by the task that answers the request. When the client goes, or the answer breaks off for any reason, what is left
of it is cancelled in the engine. Feeds the metrics. Knows nothing of JSON.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

from scheduler.request import Request
from scheduler.stream import RequestStream, Update
from server.choice import Choice, Delta, Echo, TextOptions, TokenRecord
from server.errors import APIError, DeadlineExceeded, InternalError, Unavailable
from server.exchange import current
from server.refusals import failure, refusing

if TYPE_CHECKING:
    from server.state import ServerState


class ClientGone(Exception):  # noqa: N818
    """Nobody is there to read the answer."""


class Generation:
    """Choices of all prompts, prompt by prompt: choice `i` of prompt `p` is number `p * n + i`."""

    def __init__(
        self,
        state: ServerState,
        requests: Sequence[Request],
        options: TextOptions,
        echoes: Sequence[Echo],
        spend: Callable[[int], None],
    ) -> None:
        """Queue the requests. Raises an APIError when the engine refuses them, or the deadline has passed.

        `spend` is told of tokens as they are used.
        """
        engine, metrics, clock = state.engine, state.metrics, state.clock
        self._engine, self._metrics, self._clock = engine, metrics, clock
        self._echoes = echoes
        self._n = requests[0].n
        self._arrival = requests[0].arrival or clock()
        self.decoding = state.tokenizing.decoding
        self.options = options
        self._cached = [0] * len(requests)
        self._open = len(requests) * self._n
        self.gone = False  # whether the client is
        self._failed = False
        self._first_token_at: float | None = None
        self._last_token_at = [0.0] * self._open
        self.requests = requests
        self.accepted_tokens = self.rejected_tokens = 0  # of drafts, in choices that the engine has ended
        self.prompt_tokens = sum(len(request.prompt) for request in requests)
        exchange = current.get()
        remaining = (math.inf if exchange is None else exchange.deadline) - clock()
        if remaining <= 0:
            metrics.refuse("deadline")
            raise DeadlineExceeded
        with refusing(metrics):
            self._streams = engine.submit(requests)
        self._spend = spend
        spend(self.prompt_tokens)
        self._expired = False
        self._timer = None
        if remaining < math.inf:
            self._timer = asyncio.get_running_loop().call_later(remaining, self._expire)
        self._lives = [life for request in requests if (life := engine.journal.life(request.id)) is not None]
        detokenizer = self.decoding.detokenizer
        starts = [len(echo.text or "") for echo in echoes] or [0] * len(requests)
        self.choices = [
            Choice(number, options, detokenizer(options.skip_special, options.shown), starts[number // self._n])
            for number in range(self._open)
        ]

    @property
    def finished(self) -> bool:
        return self._open == 0

    @property
    def completion_tokens(self) -> int:
        return sum(choice.completion_tokens for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached)

    def timings(self) -> dict[str, float]:
        """Where the time went, in llama.cpp's names: `prompt_ms` from the first admission to the first token, of
        `prompt_n` tokens computed beside `cache_n` found; `predicted_ms` from there to the last token."""
        admitted = (self._lives and self._lives[0].admitted_at) or self._arrival
        first = self._first_token_at or admitted
        last = max(first, *self._last_token_at)
        computed, generated = self.prompt_tokens - self.cached_tokens, self.completion_tokens
        return {
            "queue_ms": 1e3 * (admitted - self._arrival),
            "cache_n": self.cached_tokens,
            "prompt_n": computed,
            "prompt_ms": 1e3 * (first - admitted),
            "prompt_per_second": computed / max(first - admitted, 1e-6),
            "predicted_n": generated,
            "predicted_ms": 1e3 * (last - first),
            "predicted_per_second": (generated - 1) / (last - first) if last > first else 0.0,
        }

    def prompt_records(self, prompt: int) -> list[TokenRecord]:
        """The tokens of a prompt that has been scored."""
        return self._echoes[prompt].records(self.decoding, self.options.skip_special)

    def client_gone(self) -> None:
        """Stop working for a client that went away: `deltas` raises ClientGone as soon as the engine lets go."""
        self.gone = True
        self._cancel()

    def _expire(self) -> None:
        self._expired = True
        self._cancel()

    async def deltas(self) -> AsyncGenerator[list[tuple[Choice, Delta]]]:
        """What is new, update by update, until every choice is finished. To be closed by its reader.

        Raises APIError or ClientGone.
        """
        try:
            async for prompt, update in self._updates():
                yield self._take(prompt, update)
                if self.finished:
                    return
            raise ClientGone if self.gone else InternalError("The answer broke off.")
        except APIError:
            self._failed = True
            raise
        finally:
            self._close()

    def _take(self, prompt: int, update: Update) -> list[tuple[Choice, Delta]]:
        if update.error is not None:
            raise failure(update.error)
        if update.finish_reason == "cancelled":
            if self._expired:
                raise DeadlineExceeded
            raise ClientGone if self.gone else Unavailable("The request was cancelled by the server.")
        self._cached[prompt] = update.cached_tokens
        self.accepted_tokens += update.accepted_tokens
        self.rejected_tokens += update.rejected_tokens
        echo, updates = self._echoes[prompt] if self._echoes else None, [update]
        if echo is not None:
            echo.logprobs += update.prompt_logprobs
            echo.held.append(update)
            if not echo.complete:
                return []
            updates, echo.held = echo.held, []
        result = []
        for update in updates:
            choice = self.choices[prompt * self._n + update.index]
            if choice.finish_reason is not None:
                continue  # a stop string ended it; the engine has not yet heard
            delta = choice.take(update)
            self._observe(choice, update)
            if choice.finish_reason is not None:
                self._open -= 1
                if update.finish_reason is None:
                    self._engine.stop_choice(self.requests[prompt].id, update.index, "stop")
            if echo is not None and echo.text is not None and not choice.echoed:
                choice.echoed = True
                result.append((choice, echo.delta(self.decoding, self.options.skip_special)))
            result.append((choice, delta))
        return result

    async def _updates(self) -> AsyncIterator[tuple[int, Update]]:
        if len(self._streams) == 1:
            async for update in self._streams[0]:
                yield 0, update
            return
        merged: asyncio.Queue[tuple[int, Update] | None] = asyncio.Queue()

        async def pump(prompt: int, stream: RequestStream) -> None:
            async for update in stream:
                merged.put_nowait((prompt, update))
            merged.put_nowait(None)

        pumps = [asyncio.create_task(pump(prompt, stream)) for prompt, stream in enumerate(self._streams)]
        try:
            running = len(pumps)
            while running:
                item = await merged.get()
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for task in pumps:
                task.cancel()

    def _observe(self, choice: Choice, update: Update) -> None:
        """Count an update's tokens. Called after the choice has taken them."""
        tokens = len(update.tokens) + (update.stop_token is not None)
        if not tokens:
            return
        now = self._clock()
        metrics = self._metrics
        metrics.generated_tokens.inc(tokens)
        if self._first_token_at is None:
            self._first_token_at = now
            metrics.first_token.observe(now - self._arrival)
            metrics.prompt_tokens.inc(self.prompt_tokens)
            if self._lives and (admitted := self._lives[0].admitted_at) is not None:
                metrics.queue_time.observe(admitted - self._arrival)
                metrics.prefill_time.observe(now - admitted)
        before = self._last_token_at[choice.index]
        self._last_token_at[choice.index] = now
        if before:
            for _ in range(tokens):
                metrics.token_gap.observe((now - before) / tokens)

    def _cancel(self) -> None:
        for request in self.requests:
            self._engine.cancel(request.id)

    def _close(self) -> None:
        """Leave nothing behind in the engine, and book how it ended."""
        if self._timer is not None:
            self._timer.cancel()
        self._spend(self.completion_tokens)
        if not self.finished:
            self._cancel()
        metrics = self._metrics
        now = self._clock()
        reasons = {choice.finish_reason for choice in self.choices}
        if not self.finished:
            outcome = "error" if self._failed else "cancelled"
        else:
            outcome = "length" if "length" in reasons else "stop"
        metrics.outcomes[outcome].inc()
        metrics.duration.observe(now - self._arrival)
        metrics.prompt_sizes.observe(self.prompt_tokens)
        metrics.answer_sizes.observe(self.completion_tokens)
        longest = max(choice.completion_tokens for choice in self.choices)
        if self._first_token_at is not None:
            decoding = max(self._last_token_at) - self._first_token_at
            metrics.decode_time.observe(decoding)
            if longest > 1:
                metrics.per_token.observe(decoding / (longest - 1))
        if (exchange := current.get()) is not None:
            exchange.lives = self._lives
            exchange.generation = self._facts(outcome)

    def _facts(self, outcome: str) -> dict[str, str | float]:
        """What log and trace say of it."""
        timings = self.timings()
        return {
            "ids": ",".join([request.id for request in self.requests[:4]]),
            "outcome": outcome,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.completion_tokens,
            "queue_seconds": round(timings["queue_ms"] / 1e3, 6),
            "prefill_seconds": round(timings["prompt_ms"] / 1e3, 6),
            "decode_seconds": round(timings["predicted_ms"] / 1e3, 6),
            "preemptions": sum(life.preemptions for life in self._lives),
            "accepted_tokens": sum(life.accepted_tokens for life in self._lives),
        }
