"""How much may wait: so many choices, so many prompt tokens, and so long.

The third is what keeps the time to first token in an overload: a request that would wait longer for a place than
`max_queue_delay` is refused at once, told when to come back. How long it would wait is who stands before it over the
rate at which sequences leave, and no less than the first of those has waited. Where the bound is not given it is the
time that a first token takes once its request has a place, as measured: then no wait more than about doubles the time
to first token.

No owner holds more of the queue than it leaves free for others (Choudhury, Hahne: Dynamic Queue Length Thresholds,
1998). Owned by the engine's task.
"""

from __future__ import annotations

from scheduler.errors import QueueFull
from scheduler.request import Status
from scheduler.requests import Requests
from scheduler.state import State

# Below these nobody is refused for the delay: a burst is worth waiting for, and a few requests are hardly any load.
MIN_DELAY_SECONDS = 30.0
MIN_TAKEN = 8  # choices, running and waiting


def check_queue(
    owner: str,
    choices: int,
    priority: int,
    prompt_tokens: int,
    state: State,
    requests: Requests,
    *,
    left_behind: bool,
    now: float,
) -> None:
    """Raises QueueFull when so many choices of an owner may not wait. `left_behind`: the last plan left somebody
    waiting, so that slots which are free cannot be had."""
    limits, waiting = state.limits, state.num_waiting
    free = 0 if left_behind else len(state.free_slots)

    def full(count: int, limit: float, unit: str, departures: float) -> QueueFull:
        return QueueFull(count, limit, unit, requests.drain_rate.retry_after_seconds(departures, now))

    room = limits.max_queued_requests + free - waiting
    if choices > room:
        raise full(waiting, limits.max_queued_requests, "requests", choices - room)
    if owner and waiting:
        mine = [sequence for sequence in (*state.waiting, *state.running) if sequence.request.owner == owner]
        pending = sum(choice.status is Status.PENDING for sequence in mine for choice in sequence.forks)
        own = pending + sum(sequence.status is Status.QUEUED for sequence in mine)
        if own + choices > room:
            raise full(own, (own + room) // 2, "share", own + choices - room)
    if limits.max_queued_tokens is not None:
        queued = sum(sequence.prompt_length for sequence in state.waiting if sequence.index == 0)
        if queued and queued + prompt_tokens > limits.max_queued_tokens:
            raise full(queued, limits.max_queued_tokens, "tokens", len(state.waiting))

    rate = requests.drain_rate.per_second(now)
    if not rate or waiting + state.num_running < MIN_TAKEN:
        return
    # It waits for its first place only: a batch larger than the slots is still one request.
    priority = priority if limits.policy == "priority" else 0
    before = state.waiting_before((priority, requests.shares.next_tag(owner, state.running) + 1, 0, 0))
    places = len(before) + state.num_pending + 1 - (0 if state.short_of_pages else len(state.free_slots))
    # With places free, it is the prompts before it that hold it up: not for less than the first of them has waited.
    waits = (now - one.queued_at for one in before if one.held_by is None and not one.preemptions)
    delay = max(places / rate, next(waits, 0.0))
    bound = limits.max_queue_delay
    if bound is None:
        bound = max(MIN_DELAY_SECONDS, requests.first_token_seconds)
    if delay > bound:
        raise full(round(delay), round(bound, 1), "seconds", (delay - bound) * rate)
