"""Every request that has not ended, and the ways it can end.

Owned by the engine's task; `end` may be called by anyone on the event loop. While a step is in
flight nothing that it reads is given back: ends that come from outside are kept until it is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scheduler.drain_rate import DrainRate
from scheduler.errors import SchedulerError
from scheduler.fairness import FairShares
from scheduler.journal import Journal, RequestLife
from scheduler.request import FinishReason, Request, Sequence, Status
from scheduler.state import State
from scheduler.stream import RequestStream


@dataclass(slots=True)
class ActiveRequest:
    """A request, its choices, its life so far and its reader's end."""

    request: Request
    choices: list[Sequence]
    life: RequestLife
    stream: RequestStream
    unfinished: int


class Requests:
    """Invariant: a request is here as long as one of its choices has not finished."""

    def __init__(
        self,
        state: State,
        journal: Journal,
        clock: Callable[[], float],
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self.drain_rate = DrainRate()
        self.shares = FairShares()
        self.first_token_seconds = 0.0  # from a place to the first token, recent mean
        self.on_end: Callable[[Sequence, str], None] | None = None  # told of each choice, before anything is given back
        self.step_in_flight = False
        self._state = state
        self._journal = journal
        self._clock = clock
        self._eos_token_ids = eos_token_ids
        self._active: dict[str, ActiveRequest] = {}
        self._ending: list[Sequence] = []
        self._submitted = 0

    def __len__(self) -> int:
        return len(self._active)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._active

    def __getitem__(self, request_id: str) -> ActiveRequest:
        return self._active[request_id]

    def ids(self) -> list[str]:
        return list(self._active)

    def open(self, request: Request) -> RequestStream:
        now = self._clock()
        state = self._state
        self._submitted += 1
        priority = request.priority if state.limits.policy == "priority" else 0
        tag = self.shares.next_tag(request.owner, state.running)
        self.shares.enter(request, tag)
        choices = [
            Sequence(
                request,
                index,
                key=(priority, tag, self._submitted, index),
                context_limit=state.context_limit,
                eos_token_ids=self._eos_token_ids,
            )
            for index in range(request.n)
        ]
        arrival = now if request.arrival is None else request.arrival
        life = RequestLife(request.id, len(request.prompt), request.n, request.priority, arrival)
        life.note(now, "queued", 0, ahead=state.num_waiting, running=state.num_running)
        active = ActiveRequest(request, choices, life, RequestStream(request.id, request.n), request.n)
        self._active[request.id] = active
        self._journal.begin(life)
        for sequence in choices:
            sequence.queued_at = now
        state.submit(choices)
        if request.params.max_tokens == 0 and not choices[0].scoring:  # nothing to compute
            for sequence in choices:
                self.finish(sequence, "length")
        return active.stream

    def end(self, request_id: str, index: int | None, reason: FinishReason) -> bool:
        """End one of a request's choices, or all of them; False when there is nothing (any more) to end."""
        active = self._active.get(request_id)
        choices = [] if active is None else active.choices if index is None else [active.choices[index]]
        ending = [sequence for sequence in reversed(choices) if sequence.status is not Status.FINISHED]
        for sequence in ending:
            if sequence.finish_requested is not None:
                continue
            if self.step_in_flight and sequence.status in (Status.RUNNING, Status.FORKING):
                sequence.finish_requested = reason
                self._ending.append(sequence)
            else:
                self.finish(sequence, reason)
        return bool(ending)

    def finish_ending(self) -> None:
        """After a step: end what was to end while it ran."""
        ending, self._ending = self._ending, []
        for sequence in ending:
            if sequence.status is not Status.FINISHED:
                assert sequence.finish_requested is not None
                self.finish(sequence, sequence.finish_requested)

    def fail(self, request_id: str, error: SchedulerError, *, keep: bool = True) -> None:
        """End all of a request's choices with an error. `keep` False: its pages may hold nonsense."""
        active = self._active.get(request_id)
        if active is None:
            return
        active.life.error = f"{type(error).__name__}: {error}"
        for sequence in reversed(active.choices):
            if sequence.status is not Status.FINISHED:
                self.finish(sequence, "error", error=error, keep=keep)

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        stop_token: int | None = None,
        error: SchedulerError | None = None,
        keep: bool = True,
    ) -> None:
        """End one choice now; no step that reads it may be in flight."""
        active = self._active[sequence.request.id]
        now = self._clock()
        if self.on_end is not None:
            self.on_end(sequence, reason)
        self._state.release(sequence, keep=keep)
        if sequence.forks:
            self._state.scatter(sequence)
        sequence.finish_reason = reason
        active.stream.finish(
            sequence.index,
            reason,
            cached_tokens=sequence.cached_tokens,
            stop_token=stop_token,
            error=error,
            drafts=(sequence.accepted_tokens, sequence.drafted_tokens - sequence.accepted_tokens),
        )
        active.unfinished -= 1
        self.shares.leave(sequence)
        if sequence.computed or sequence.preemptions:  # it had a place, and leaves it
            self.drain_rate.note(now)
        if sequence.index == 0 and sequence.first_token_at is not None and sequence.admitted_at is not None:
            took = sequence.first_token_at - sequence.admitted_at
            self.first_token_seconds += 0.1 * (took - self.first_token_seconds)
        life = active.life
        output_tokens = sequence.known - sequence.prompt_length
        life.output_tokens += output_tokens
        life.finish_reasons.append(reason)
        life.note(now, "finished", sequence.index, reason=reason, output_tokens=output_tokens)
        if active.unfinished == 0:
            life.finished_at = now
            del self._active[sequence.request.id]
            if not self._active:
                self.shares.forget()
            self._journal.end(life.id)

    def abandon(self, request_id: str, error: SchedulerError) -> None:
        """Tell the reader and forget the request, whatever state it is in: the state cannot be trusted any more."""
        active = self._active.pop(request_id)
        self._journal.end(request_id)
        for sequence in active.choices:
            if sequence.finish_reason is None:
                active.stream.finish(sequence.index, "error", cached_tokens=sequence.cached_tokens, error=error)
