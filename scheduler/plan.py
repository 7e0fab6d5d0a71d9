"""Which tokens run in the next step.

`plan` is a deterministic function of the scheduler's state and a token budget: no clock, no I/O, no model. It changes
the state (admits, preempts, reserves pages) and says what it did. Owned by the engine's task, between steps.

The order of things:

1. Each sequence that decodes gets one row, and prompts the rest of the budget: a sixteenth of it the most senior one,
   so that it gets on whoever comes, and then of one priority whose prompt is due first: shorter ones pass longer ones
   until these have waited for so many rows (`State.submit`). Beside sequences that decode, and wait for them, prompts
   get no more than a bound of their own, or what ends a prompt, and no more than each of these sequences still bears:
   twice the bound in all, and three eighths of it for each of its tokens, so that short answers are not given in the
   middle of other people's prompts only. Within the bound it is filled up to the rows that kernels compute at a time.
   Seniority is (priority, arrival, choice).
2. Pages are reserved by seniority. When there are none, the most junior running sequence is preempted, which may be
   the one asking. So the most senior always gets its pages, and two that cannot both fit run one after the other,
   never back and forth.
3. Waiting sequences are admitted in order while budget, slots and pages last; of an owner's first few whose prompt is
   due first, if there is room for all of these. The first that finds none stops the rest, so that nobody is overtaken
   for ever. Only one whose prefix is being computed by a running neighbour is passed over: it waits for that prefix
   instead of computing it again. Under the priority policy a more urgent one takes the place of the least urgent that
   runs. Under the prefix policy those with the longest cached prefix come first, before it is evicted; who has been
   overtaken often enough comes before them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

from kvstore.runs import common_length
from scheduler.drafted import Drafted
from scheduler.errors import OutOfPages
from scheduler.request import Sequence, SortKey, Status
from scheduler.state import State

# What a sequence bears of prompts beside it, in bounds for one step: a part of one for each of its tokens, and more
# besides. In chats of 16 clients, planned by this code and timed by a model of a step, the slowest answer takes 1.7
# times as long for a token as the median one, 2.0 times without; the mean time to the first token is 8% longer.
BOUNDS_A_TOKEN = 0.375
BOUNDS_BESIDES = 2
# A step of prompts beside others has a multiple of so many rows, save where prompts have few: two threads compute eight
# each at a time, and what would be missing costs as much.
ROWS_TOGETHER = 16
FEW_ROWS = 64
# The part of the rows for prompts that the most senior prompt gets before the others share them.
SENIOR_SHARE = 1 / 16
# How many neighbours in turn a sequence may wait for, so that a chain of them cannot hold it back for ever.
MAX_HOLDS = 8
# How many waiting sequences are compared with those neighbours in one step.
MAX_LOOKS = 256
# The prefix policy: how many of the queue it looks at, and how many others may be let in before one of them.
MAX_ORDERED = 64
MAX_OVERTAKEN = 64
# How many of those who wait are compared with each other and with the prompts that are being computed.
MAX_COMING = 8


@dataclass(slots=True)
class StepPlan:
    """What runs, and what was moved to make it so. `sequences[i]` gets `rows[i]` rows from its `computed` on."""

    sequences: list[Sequence] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[tuple[Sequence, int]] = field(default_factory=list)  # and the tokens it had computed
    failed: list[tuple[Sequence, Exception]] = field(default_factory=list)  # still QUEUED: for the engine to end
    waits: list[tuple[Sequence, str]] = field(default_factory=list)  # whose reason to wait has changed
    waiting_reasons: dict[str, int] = field(default_factory=dict)  # sequences by why they were not admitted
    spare: int = 0  # rows of the budget that nobody took
    drafts: list[Drafted] = field(default_factory=list)  # what is verified beside, decided after planning

    def drop_ended(self) -> None:
        """Leave out what has ended since: choices of a request of which another one failed."""
        kept = [i for i, sequence in enumerate(self.sequences) if sequence.status is Status.RUNNING]
        self.sequences, self.rows = [self.sequences[i] for i in kept], [self.rows[i] for i in kept]


@dataclass(slots=True)
class _Budget:
    """The rows left in this step. Rows with prompt logprobs have a bound of their own."""

    tokens: int
    scored: int
    aside: int = 0  # kept from prompts, because others decode
    to_end: int = 0  # of those, what may be taken to end a prompt

    def limit_prompts(self, bound: int, borne: int, decoding: int) -> None:
        prompts = min(bound, borne)
        if prompts >= FEW_ROWS:
            prompts += -(prompts + decoding) % ROWS_TOGETHER
            prompts -= ROWS_TOGETHER if prompts > bound else 0
        self.aside = max(0, self.tokens - prompts)
        self.tokens -= self.aside
        self.to_end = min(self.aside, max(0, borne - bound))

    def take(self, sequence: Sequence, has: int = 0, most: int | None = None) -> int:
        """Rows for a sequence beside those it has, at most `most`. While there are `tokens`."""
        rest = sequence.goal - sequence.computed - has
        rows = rest if rest <= self.tokens + self.to_end else self.tokens
        if most is not None:
            rows = min(rows, most)
        if sequence.scoring:
            rows = min(rows, self.scored)
            self.scored -= rows
        beyond = max(0, rows - self.tokens)
        self.aside -= beyond
        self.to_end -= beyond
        self.tokens -= rows - beyond
        return rows


def plan(state: State, budget: int) -> StepPlan:
    """Choose the next step's rows, at most `budget` of them. Empty only when nothing runs and nothing can."""
    step = StepPlan()
    left = _Budget(budget, state.limits.max_scored_rows)
    running = list(state.running)
    rows = [0] * len(running)
    prefilling = []
    bound = state.limits.max_prefill_beside
    besides, a_token = BOUNDS_BESIDES * bound, max(1, int(BOUNDS_A_TOKEN * bound))
    borne = besides
    for position, sequence in enumerate(running):
        if sequence.goal - sequence.computed > 1:
            prefilling.append(position)
        elif left.tokens:
            rows[position] = left.take(sequence)
            tokens = a_token * (sequence.known - sequence.prompt_length)
            if sequence.bears is None:
                sequence.bears = state.prompt_rows + besides - tokens
            borne = min(borne, sequence.bears + tokens - state.prompt_rows)
    if len(prefilling) < len(running):
        left.limit_prompts(bound, max(a_token, borne), sum(rows))
    kept = _take_prompts(state, left, prefilling, rows)

    reserve = state.kv.reserve
    for sequence, count in zip(running, rows, strict=True):
        if not count:
            continue
        if sequence.status is not Status.RUNNING:  # preempted a moment ago
            left.tokens += count
            continue
        pages = sequence.kv
        assert pages is not None
        length = sequence.computed + count
        while pages.writable < length and not reserve(pages, length):
            victim = state.running[-1]
            _preempt(state, step, victim)
            if victim is sequence:
                left.tokens += count
                break
        else:
            step.sequences.append(sequence)
            step.rows.append(count)

    left.tokens += kept
    if state.waiting or state.num_pending:
        _admit_waiting(state, step, left)
    if kept and left.tokens:
        _take_more(state, step, left)
    state.prompt_rows += sum(
        count
        for sequence, count in zip(step.sequences, step.rows, strict=True)
        if count > 1 or sequence.known == sequence.prompt_length  # the last row of a prompt is one of its rows too
    )
    step.spare = left.tokens + left.aside
    return step


def _take_prompts(state: State, left: _Budget, prefilling: list[int], rows: list[int]) -> int:
    """Rows for the prompts under way, and how many are kept for those that wait and are due before."""
    if not prefilling:
        return 0
    if left.tokens:
        rows[prefilling[0]] = left.take(state.running[prefilling[0]], most=math.ceil(SENIOR_SHARE * left.tokens))
    turns = [(_turn(state.running[position]), position) for position in prefilling]
    coming = _coming(state)
    turns += [(_turn(sequence), -1 - i) for i, sequence in enumerate(coming) if sequence.held_by is None]
    kept = 0
    for _, position in sorted(turns):
        if not left.tokens:
            break
        if position >= 0:
            rows[position] += left.take(state.running[position], rows[position])
        else:
            coming_rows = min(coming[-1 - position].goal, left.tokens)
            left.tokens -= coming_rows
            kept += coming_rows
    return kept


def _coming(state: State) -> list[Sequence]:
    """The first of those who wait: there is a slot for each of them."""
    return state.waiting[: min(MAX_COMING, len(state.free_slots))]


def _turn(sequence: Sequence) -> tuple[int, int, SortKey]:
    return sequence.key[0], sequence.due, sequence.key


def _take_more(state: State, step: StepPlan, left: _Budget) -> None:
    """What was kept for those who wait and could not come in, to the prompts that run."""
    for i, sequence in enumerate(step.sequences):
        rest = sequence.goal - sequence.computed - step.rows[i]
        more = min(rest, left.tokens)
        if more > 0 and not sequence.scoring and sequence.kv is not None:
            length = sequence.computed + step.rows[i] + more
            if sequence.kv.writable >= length or state.kv.reserve(sequence.kv, length):
                step.rows[i] += more
                left.tokens -= more


def _preempt(state: State, step: StepPlan, victim: Sequence) -> None:
    step.preempted.append((victim, victim.computed))
    state.preempt(victim)


def _admit_waiting(state: State, step: StepPlan, left: _Budget) -> None:
    prefixes = _PrefixesUnderWay(state)
    reason = ""
    held = 0
    for sequence in _in_order(state):
        if not left.tokens or (sequence.scoring and not left.scored):
            reason = "budget"
        elif not prefixes.may_look(sequence):
            reason = "queue"
        elif prefixes.hold(sequence):
            _note(step, sequence, "prefix")
            held += 1
        elif not state.free_slots and not _displace(state, step, left, sequence):
            reason = "slots"
        else:
            try:
                while not (admitted := state.admit(sequence)) and _displace(state, step, left, sequence):
                    pass
            except Exception as error:
                step.failed.append((sequence, error))
                continue
            if admitted:
                step.admitted.append(sequence)
                step.sequences.append(sequence)
                step.rows.append(left.take(sequence))
                prefixes.add(sequence)
                if state.limits.policy == "prefix":
                    for other in state.waiting_before(sequence.key):
                        other.overtaken += 1
            elif state.running:
                reason = "pages"
            else:
                step.failed.append((sequence, OutOfPages(f"{sequence.goal} tokens do not fit in an empty pool")))
        if reason:
            _note(step, sequence, reason)
            break
    queued = len(state.waiting) - held - len(step.failed)
    counts = {"prefix": held, reason: queued, "prompt": state.num_pending}
    step.waiting_reasons = {why: count for why, count in counts.items() if count}


def _in_order(state: State) -> list[Sequence]:
    """Who is asked to come in, in this order: of the first few of an owner whose prompt is due first, if there is room
    for them all. Under the prefix policy those with the longest cached prefix first, save that nobody is
    overtaken by more than MAX_OVERTAKEN.
    """
    waiting = state.waiting
    if state.limits.policy != "prefix" or len(waiting) < 2 or not state.free_slots:
        coming = _coming(state)
        if not _have_room(state, coming):
            return waiting.copy()
        of_owner: dict[str, list[Sequence]] = {}
        for sequence in sorted(coming, key=_turn, reverse=True):
            of_owner.setdefault(sequence.request.owner, []).append(sequence)
        return [of_owner[sequence.request.owner].pop() for sequence in coming] + waiting[len(coming) :]
    cached: dict[Sequence, int] = {}
    for sequence in waiting[:MAX_ORDERED]:
        if sequence.overtaken >= MAX_OVERTAKEN:
            cached[sequence] = sequence.prompt_length + sequence.known
        elif state.shares_prefixes(sequence):
            cached[sequence] = state.kv.match_length(sequence.tokens, sequence.request.namespace)
    return sorted(waiting, key=lambda sequence: (-cached.get(sequence, 0), sequence.key))


def _have_room(state: State, coming: list[Sequence]) -> bool:
    """Whether all would be admitted, in whatever order: with slots for their choices, and with the pages that
    `State.admit` leaves over.

    NOTE: else those that pass a longer one leave it none, and others come before it for as long as they are short.
    """
    slots = sum(1 + len(sequence.forks) for sequence in coming)
    pages = sum(sequence.goal // state.kv.page_size + 1 for sequence in coming)
    left_over = len(state.running) + len(coming)
    return slots <= len(state.free_slots) and pages + left_over <= state.available_pages


def _note(step: StepPlan, sequence: Sequence, reason: str) -> None:
    if sequence.wait_reason != reason:
        sequence.wait_reason = reason
        step.waits.append((sequence, reason))


def _displace(state: State, step: StepPlan, left: _Budget, sequence: Sequence) -> bool:
    """Preempt the most junior running sequence if its priority is lower than that of `sequence`."""
    if not state.running:
        return False
    victim = state.running[-1]
    if victim.key[0] <= sequence.key[0]:
        return False
    if victim in step.sequences:
        position = step.sequences.index(victim)
        del step.sequences[position]
        left.tokens += step.rows.pop(position)
    _preempt(state, step, victim)
    return True


class _PrefixesUnderWay:
    """The running sequences that have more than a page of their prompt to compute.

    Found by their first page, by how many tokens they have computed, and by the page and a token that come next:
    whoever agrees in all three may share what is about to be computed. Nothing else is compared token by token.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._page_size = state.kv.page_size
        self._leaders: dict[tuple[Hashable, bytes], dict[int, dict[bytes, list[Sequence]]]] = {}
        self._looks = MAX_LOOKS
        for sequence in state.running:
            self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        if sequence.goal - sequence.computed > self._page_size and self._state.shares_prefixes(sequence):
            by_computed = self._leaders.setdefault(self._first_page(sequence), {})
            by_next = by_computed.setdefault(sequence.computed, {})
            by_next.setdefault(self._after(sequence, sequence.computed), []).append(sequence)

    def may_look(self, sequence: Sequence) -> bool:
        """Whether `hold` can still be asked in this step: looking at a long queue must not take longer than a step."""
        return self._looks > 0 or sequence.held_by is not None

    def hold(self, sequence: Sequence) -> bool:
        """Whether to let it wait: a running one is about to compute more than a page of what it needs and has not."""
        leader = sequence.held_by
        if leader is not None:
            if leader.status is Status.RUNNING and leader.computed < sequence.held_until:
                return True
            sequence.held_by = None
        self._looks -= 1
        if sequence.holds >= MAX_HOLDS or not self._state.shares_prefixes(sequence):
            return False
        shared, leader = 0, None
        for computed, by_next in self._leaders.get(self._first_page(sequence), {}).items():
            for candidate in by_next.get(self._after(sequence, computed), ()):
                length = common_length(candidate.tokens, sequence.tokens)
                if length > shared:
                    shared, leader = length, candidate
        if leader is None:
            return False
        cached = self._state.kv.match_length(sequence.tokens, sequence.request.namespace)
        if shared - cached <= self._page_size:
            return False
        sequence.held_by, sequence.held_until = leader, shared
        sequence.holds += 1
        return True

    def _first_page(self, sequence: Sequence) -> tuple[Hashable, bytes]:
        return sequence.request.namespace, sequence.tokens[: self._page_size].tobytes()

    def _after(self, sequence: Sequence, computed: int) -> bytes:
        return sequence.tokens[computed : computed + self._page_size + 1].tobytes()
