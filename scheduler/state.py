"""The scheduler's state: who waits, who runs, and the moves between the two.

Owned by the engine's task. It knows how to move a sequence, not when: that is `plan`'s decision. Moves happen between
steps only, so no page or sampling row changes hands while the model uses it.

           submit          admit             finish
    (new) ───────▶ QUEUED ───────▶ RUNNING ─────────▶ FINISHED
                     ▲   preempt     │  ▲
                     └───────────────┘  │ fork, when choice 0 has computed the prompt
    (choice > 0) ─▶ PENDING ────▶ FORKING
                       with a free slot
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from heapq import heappop, heappush
from operator import attrgetter

from kvstore.store import KVStore
from models.sampling_state import SamplingState
from scheduler.limits import Limits
from scheduler.request import Sequence, SortKey, Status

# When the longest prompts are due, in steps of prompts only.
LATEST_STEPS = 8

_key = attrgetter("key")


class State:
    """Invariants: `waiting` and `running` are sorted by seniority; a sequence has pages if and only if it is RUNNING,
    and a sampling slot if and only if it is RUNNING or FORKING."""

    def __init__(self, kv: KVStore, sampling: SamplingState, limits: Limits) -> None:
        self.kv = kv
        self.sampling = sampling
        self.limits = limits
        self.context_limit = min(limits.max_model_len, kv.max_length())
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.prompt_rows = 0  # computed since the start
        self.num_pending = 0  # PENDING choices: they wait, but not in the queue
        self.num_forking = 0
        self.free_slots = list(range(limits.max_num_seqs))
        self.on_leave: Callable[[Sequence], None] | None = None  # told of who loses its pages, for whatever reason
        # The sequence whose admission found no pages: pointless to repeat until someone gives pages back.
        self.short_of_pages: Sequence | None = None

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + self.num_pending

    @property
    def num_running(self) -> int:
        return len(self.running) + self.num_forking

    @property
    def available_pages(self) -> int:
        """Pages that a reservation could get without preempting anyone."""
        stats = self.kv.stats()
        return stats.free + stats.evictable

    def submit(self, choices: list[Sequence]) -> None:
        """Queue choice 0 of a new request. The others wait for its prompt to be computed.

        The prompt is due when as many rows of prompts have been computed as it has, and seven times as many or
        LATEST_STEPS full steps more. In chats of 16 clients, planned by this code and timed by a model of a step, the
        median time to the first token is 6% shorter than when it is due after as many as it has.
        """
        choices[0].forks = choices[1:]
        latest = LATEST_STEPS * self.limits.max_num_batched_tokens
        for choice in choices:
            choice.due = self.prompt_rows + choice.goal + min(7 * choice.goal, latest)
        self.num_pending += len(choices) - 1
        self.enqueue(choices[0])

    def enqueue(self, sequence: Sequence) -> None:
        sequence.status = Status.QUEUED
        insort(self.waiting, sequence, key=_key)

    def waiting_before(self, key: SortKey) -> list[Sequence]:
        """Those that wait and are more senior."""
        return self.waiting[: bisect_left(self.waiting, key, key=_key)]

    def admit(self, sequence: Sequence) -> bool:
        """Give a queued sequence a slot and pages for all its tokens. False, and no change, when there are none.

        A page for each running sequence, the new one included, is left over: else the next ones to grow would push it
        out at once."""
        if self.short_of_pages is sequence:
            return False
        kv = self.kv
        pages = kv.open(sequence.tokens, sequence.request.namespace, use_cache=self.shares_prefixes(sequence))
        if pages is None:
            self.short_of_pages = sequence
            return False
        cached = pages.computed
        if not kv.reserve(pages, sequence.goal) or (self.running and self.available_pages <= len(self.running)):
            kv.close(pages, sequence.tokens, cached)
            self.short_of_pages = sequence
            return False
        if self.shares_prefixes(sequence):
            kv.restore(pages, sequence.tokens)
        slot = heappop(self.free_slots)
        try:
            self.sampling.open(slot, sequence.params, sequence.request.prompt, sequence.outputs)
        except BaseException:
            heappush(self.free_slots, slot)
            kv.close(pages, sequence.tokens, pages.computed)
            raise
        self._drop_from(self.waiting, sequence)
        sequence.status, sequence.kv, sequence.slot, sequence.computed = Status.RUNNING, pages, slot, pages.computed
        sequence.restored = pages.computed - cached
        if sequence.index == 0 and not sequence.preemptions:
            sequence.cached_tokens = pages.computed
        insort(self.running, sequence, key=_key)
        self._reserve_forks(sequence)
        return True

    def shares_prefixes(self, sequence: Sequence) -> bool:
        """Whether it may start from cached pages. One that owes prompt logprobs has to compute every prompt row."""
        return self.limits.prefix_caching and not sequence.scoring

    def _reserve_forks(self, sequence: Sequence) -> None:
        """Slots for as many of the request's other choices as there are, so that forking cannot fail half way."""
        for child in sequence.forks[: len(self.free_slots)]:
            slot = heappop(self.free_slots)
            self.sampling.open(slot, child.params, child.request.prompt, child.outputs)
            child.status, child.slot = Status.FORKING, slot
            self.num_pending -= 1
            self.num_forking += 1

    def preempt(self, sequence: Sequence) -> None:
        """Back to the queue. What it computed goes to the prefix tree, where it may survive until it resumes."""
        for child in sequence.forks:
            if child.status is Status.FORKING:
                self._unfork(child)
        self._leave(sequence, sequence.computed)
        sequence.computed = 0
        sequence.preemptions += 1
        sequence.bears = None
        self.enqueue(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Let a FORKING choice run on its own from the parent's computed prompt. False when the store has no room for
        it: it keeps its slot and runs without pages, and has to be preempted before the next step."""
        assert parent.kv is not None
        child.kv = self.kv.fork(parent.kv)
        child.computed = parent.computed
        child.status = Status.RUNNING
        self.num_forking -= 1
        insort(self.running, child, key=_key)
        return child.kv is not None

    def scatter(self, sequence: Sequence) -> None:
        """The other choices that are still tied to choice 0 go on by themselves, through the queue."""
        for child in sequence.forks:
            if child.status is Status.FORKING:
                self._unfork(child)
            if child.status is Status.PENDING:
                self.num_pending -= 1
                child.cached_tokens = sequence.cached_tokens
                self.enqueue(child)
        sequence.forks = []

    def release(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Finish a sequence, wherever it is. Its pages go to the prefix tree, or with `keep` False are only freed."""
        match sequence.status:
            case Status.QUEUED:
                self._drop_from(self.waiting, sequence)
            case Status.PENDING:
                self.num_pending -= 1
            case Status.FORKING:
                self._free_slot(sequence)
                self.num_forking -= 1
            case Status.RUNNING:
                self._leave(sequence, sequence.computed if keep else 0)
        sequence.status = Status.FINISHED

    def _unfork(self, child: Sequence) -> None:
        self._free_slot(child)
        child.status = Status.PENDING
        self.num_forking -= 1
        self.num_pending += 1

    def _leave(self, sequence: Sequence, computed: int) -> None:
        if self.on_leave is not None:
            self.on_leave(sequence)
        if sequence.kv is not None:
            self.kv.close(sequence.kv, sequence.tokens, computed)
            sequence.kv = None
        self.short_of_pages = None
        self._free_slot(sequence)
        self._drop_from(self.running, sequence)

    def _free_slot(self, sequence: Sequence) -> None:
        self.sampling.close(sequence.slot)
        heappush(self.free_slots, sequence.slot)
        sequence.slot = -1

    @staticmethod
    def _drop_from(ordered: list[Sequence], sequence: Sequence) -> None:
        del ordered[bisect_left(ordered, sequence.key, key=_key)]
