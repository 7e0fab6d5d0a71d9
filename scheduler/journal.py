"""What the scheduler did and what became of each request, for people and for metrics.

Owned by the engine's task. Everything is bounded: the last steps, the last finished requests, and for each request the
first and last events of its life.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_EVENTS = 64  # of one request, beyond its first eight


@dataclass(slots=True)
class StepRecord:
    """One step. Durations in seconds, times by the engine's clock."""

    number: int
    time: float  # when planning began
    wait_seconds: float = 0.0  # before that, for requests about to come
    plan_seconds: float = 0.0  # planning and building the batch
    run_seconds: float = 0.0  # the model, with the way to its thread and back
    mask_seconds: float = 0.0  # of run_seconds: finding out what constraints allow
    apply_seconds: float = 0.0
    rows: int = 0
    prefill_tokens: int = 0  # rows of sequences that had more than one token to compute
    decode_rows: int = 0
    context_tokens: int = 0  # that its sequences held together after it
    attended_tokens: int = 0  # summed over its rows
    sampled_tokens: int = 0
    drafted_tokens: int = 0  # that this step verified
    accepted_tokens: int = 0  # of them
    drafts: tuple[tuple[str, int, int], ...] = ()  # for each sequence that had one: proposer, drafted, accepted
    draft_rows: tuple[tuple[str, int, int], ...] = ()  # of the same drafts: request id, choice, rows
    cached_tokens: int = 0  # prompt tokens that the sequences admitted by this step found in the cache
    sequences: tuple[tuple[str, int, int], ...] = ()  # request id, choice, rows
    admitted: tuple[str, ...] = ()  # request ids
    preempted: tuple[str, ...] = ()
    finished: int = 0  # requests
    running: int = 0
    waiting: int = 0
    waiting_reasons: Mapping[str, int] = field(default_factory=dict)
    pages_free: int = 0
    pages_evictable: int = 0
    pages_used: int = 0
    error: str | None = None


class Event(NamedTuple):
    """Something that happened to one choice of a request."""

    time: float
    kind: str  # queued, waits, admitted, prompt computed, preempted, resumed, first token, finished
    choice: int
    detail: Mapping[str, int | str]


class DraftNote(NamedTuple):
    """A draft of one choice, as its candidates, and how many tokens of the best were accepted."""

    time: float
    choice: int
    paths: list[list[int]]
    accepted: int


@dataclass(slots=True)
class RequestLife:
    """A request from queue to end."""

    id: str
    prompt_tokens: int
    n: int
    priority: int
    arrival: float
    first_events: list[Event] = field(default_factory=list)
    last_events: deque[Event] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    dropped_events: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0  # over all choices, stop tokens included
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    admitted_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    finish_reasons: list[str] = field(default_factory=list)  # in the order the choices ended
    error: str | None = None
    drafts: deque[DraftNote] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))

    def note_draft(self, time: float, choice: int, paths: list[list[int]], accepted: int) -> None:
        self.drafts.append(DraftNote(time, choice, paths, accepted))
        self.drafted_tokens += sum(map(len, paths))
        self.accepted_tokens += accepted

    def note(self, time: float, kind: str, choice: int, **detail: int | str) -> None:
        event = Event(time, kind, choice, detail)
        if len(self.first_events) < 8:
            self.first_events.append(event)
            return
        self.dropped_events += len(self.last_events) == MAX_EVENTS
        self.last_events.append(event)

    @property
    def events(self) -> list[Event]:
        return [*self.first_events, *self.last_events]


class Journal:
    """The last `steps` steps, the lives of all current requests and of the last `requests` finished ones."""

    def __init__(self, steps: int, requests: int) -> None:
        self.steps: deque[StepRecord] = deque(maxlen=steps)
        self._current: dict[str, RequestLife] = {}
        self._finished: OrderedDict[str, RequestLife] = OrderedDict()
        self._requests = requests

    def begin(self, life: RequestLife) -> None:
        self._current[life.id] = life

    def end(self, request_id: str) -> None:
        life = self._current.pop(request_id)
        self._finished.pop(request_id, None)
        self._finished[request_id] = life
        if len(self._finished) > self._requests:
            self._finished.popitem(last=False)

    def life(self, request_id: str) -> RequestLife | None:
        """The life of a current or recent request; of the current one when the id was used before."""
        return self._current.get(request_id) or self._finished.get(request_id)

    def lives(self) -> Iterator[RequestLife]:
        """Current requests, then finished ones, the latest first."""
        yield from self._current.values()
        yield from reversed(self._finished.values())
