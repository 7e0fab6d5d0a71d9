"""What a client asked for, and how far each of its choices has got.

A `Request` is immutable and comes from the server. A `Sequence` is one choice of it: the scheduler's own bookkeeping,
owned by the engine's task and touched by nothing else. Neither knows text.

A sequence has `known` tokens (prompt and output so far) of which `computed` have keys and values in pages. Every step
lets `computed` catch up with `goal`. That one rule covers prefill, chunked prefill, decode and resuming.

    buffer   | prompt ............................ | output ...... | room to grow |
             0        computed          prompt_length             known
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from enum import Enum
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvstore.sequence import KVSequence
from models.sampling import SamplingParams
from scheduler.acceptance import Acceptance
from scheduler.constraint import TokenConstraint

I32 = npt.NDArray[np.int32]

FinishReason = Literal["stop", "length", "cancelled", "error"]
SortKey = tuple[int, int, int, int]

_UINT64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """`n` continuations of one prompt. `id` is unique among the requests that have not ended."""

    id: str
    prompt: I32  # [P], P >= 1, every id inside the vocabulary
    params: SamplingParams
    n: int = 1
    priority: int = 0  # lower runs first; only under the priority policy
    namespace: Hashable = None  # prefixes are shared inside one namespace only
    owner: str = ""  # owners share the machine fairly: see `scheduler.fairness`
    arrival: float | None = None  # clock reading when the client's request came in; None: when it is submitted
    constraint: TokenConstraint | None = None  # what each choice may say; forked for each, never used itself


class Status(Enum):
    """Where a sequence is. Only FORKING and RUNNING ones hold a sampling slot."""

    QUEUED = "queued"  # in the waiting queue
    PENDING = "pending"  # a choice without a slot, waiting for its request's prompt to be computed
    FORKING = "forking"  # a choice with a slot, made when its request's last prompt row has been computed
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One choice of a request."""

    request: Request
    index: int
    _: KW_ONLY
    key: SortKey  # smaller is more senior: runs first, is preempted last
    context_limit: InitVar[int]
    eos_token_ids: InitVar[tuple[int, ...]]

    params: SamplingParams = field(init=False)
    prompt_length: int = field(init=False)
    known_limit: int = field(init=False)
    buffer: I32 = field(init=False)
    known: int = field(init=False)
    computed: int = 0
    goal: int = field(init=False)
    scored: int = field(init=False)  # prompt tokens whose logprob has been reported; the first has none
    stop_ids: frozenset[int] = field(init=False)
    constraint: TokenConstraint | None = None  # forked from the request's when it is first asked

    status: Status = field(init=False)
    kv: KVSequence | None = None
    slot: int = -1  # row in the sampling state; -1 when it holds none
    forks: list[Sequence] = field(default_factory=list)  # choice 0, until its prompt is computed: the other choices
    finish_reason: FinishReason | None = None
    finish_requested: FinishReason | None = None  # applied when the step in flight is over

    wait_reason: str = "queue"
    held_by: Sequence | None = None  # computes a prefix this one is waiting for
    held_until: int = 0  # tokens of `held_by` that have to be computed
    holds: int = 0
    due: int = 0  # the rows of prompts, of all since the start, after which its own comes before shorter ones
    bears: int | None = None  # rows of prompts, of all since the start, up to which it decodes; more with each token
    overtaken: int = 0  # how many more junior ones were admitted before it, under the prefix policy

    cached_tokens: int = 0  # prompt tokens found in the cache when it was first admitted
    restored: int = 0  # tokens that came from the second tier when it was last admitted
    preemptions: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)
    undrafted: int = 0  # steps since it last had a draft
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    queued_at: float = 0.0
    admitted_at: float | None = None
    first_token_at: float | None = None

    def __post_init__(self, context_limit: int, eos_token_ids: tuple[int, ...]) -> None:
        params, index = self.request.params, self.index
        self.params = replace(params, seed=derive_seed(params.seed, index)) if index else params
        self.known = self.prompt_length = len(self.request.prompt)
        self.known_limit = min(self.prompt_length + params.max_tokens, context_limit)
        self.buffer = np.empty(min(self.known_limit, self.prompt_length + 64), np.int32)
        self.buffer[: self.prompt_length] = self.request.prompt
        # Scoring a prompt without sampling needs no row for its last token.
        self.goal = self.prompt_length if params.max_tokens else self.prompt_length - 1
        # Only choice 0 scores.
        self.scored = 1 if params.prompt_logprobs is not None and index == 0 else self.prompt_length
        self.stop_ids = frozenset(
            params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *eos_token_ids)
        )
        self.status = Status.QUEUED if index == 0 else Status.PENDING

    @property
    def tokens(self) -> I32:
        """[known] a view, valid until the next `append`."""
        return self.buffer[: self.known]

    @property
    def outputs(self) -> I32:
        """[known - prompt_length] a view, valid until the next `append`."""
        return self.buffer[self.prompt_length : self.known]

    @property
    def scoring(self) -> bool:
        """Whether prompt logprobs are still owed, so that every prompt row has to be computed here."""
        return self.scored < self.prompt_length

    def append(self, token: int) -> None:
        if self.known == len(self.buffer):
            grown = np.empty(min(self.known_limit, 2 * self.known), np.int32)
            grown[: self.known] = self.buffer
            self.buffer = grown
        self.buffer[self.known] = token
        self.known += 1
        self.goal = self.known

    def __repr__(self) -> str:
        return f"<{self.request.id}/{self.index} {self.status.value} {self.computed}/{self.known}>"


def derive_seed(seed: int, index: int) -> int:
    """The seed of choice `index`: the request's own for choice 0, else 64 bits mixed from both by SplitMix64
    (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _UINT64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _UINT64
    z ^= z >> 31
    return z - (1 << 64) if z >> 63 else z
