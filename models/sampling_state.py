"""What sampling needs to remember of each running sequence, kept as arrays so that a step's batch is a few gathers.

Owner: the scheduler's engine task, which calls every method here between steps; a runner reads the batches during a
step and nothing is changed meanwhile. Knows slots (small integers that stand for sequences), not requests.

Per slot: its parameters, how many tokens it has put out, its biases, and for a slot with penalties a row of counts:

    counts [rows, vocab]   bit 30: the token is in the prompt; bits 0-29: how often it is in the output

A row behind drafted tokens is treated as if they were output already: it gets a row of counts for the time of the
step, a copy of its slot's with the drafts added, and they count towards min_tokens and bad words.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from models.sampling import F32, I32, I64, IN_PROMPT, U32, SamplingBatch, SamplingParams

GREEDY_BELOW = 1e-5  # a temperature under this is 0: even ties between equal logits are then settled as greedy does
FIRST_COUNT_ROWS = 4
ALWAYS = np.iinfo(np.int32).max
# What completing a bad word costs: more than any logit and bias can make up for, yet finite, so that a token remains
# when everything else is forbidden.
BAD_WORD_BIAS = np.float32(-1e5)
NO_DRAFTS: Mapping[int, I32] = MappingProxyType({})


# What is added to the logit of a token in a row. An entry holds while the row's slot has fewer outputs than `until`.
Biases = npt.NDArray[np.void]
BIAS = np.dtype([("row", np.int32), ("token", np.int32), ("value", np.float32), ("until", np.int32)])


@dataclass(frozen=True, slots=True)
class _Words:
    """The bad words of one slot that have several tokens, and as many of its last outputs as they can begin with."""

    words: tuple[tuple[int, ...], ...]
    tail: deque[int]

    def completing(self, drafts: I32 | tuple[()] = ()) -> list[int]:
        """The tokens that would complete one behind these drafts."""
        tail = (*self.tail, *map(int, drafts))
        return sorted({word[-1] for word in self.words if tail[1 - len(word) :] == word[:-1]})


class _Rows(NamedTuple):
    """What does not change from step to step while the slots behind the rows are the same."""

    sampling: SamplingBatch
    biases: Biases
    lasting: bool  # whether every bias holds always


class SamplingState:
    """Parameters and counts of up to `max_sequences` running sequences.

    Invariants: counts equal what `open` would make of the same prompt and outputs; a slot has a row of counts if and
    only if it is open and has a penalty; no two slots share one.
    """

    def __init__(self, max_sequences: int, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.vocab_size = vocab_size
        self._eos = eos_token_ids
        self._open: npt.NDArray[np.bool_] = np.zeros(max_sequences, np.bool_)
        self._temperature: F32 = np.zeros(max_sequences, np.float32)
        self._top_p: F32 = np.ones(max_sequences, np.float32)
        self._top_k: I32 = np.zeros(max_sequences, np.int32)
        self._min_p: F32 = np.zeros(max_sequences, np.float32)
        self._seed: I64 = np.zeros(max_sequences, np.int64)
        self._logprobs: I32 = np.full(max_sequences, -1, np.int32)
        self._prompt_logprobs: I32 = np.zeros(max_sequences, np.int32)
        self._presence: F32 = np.zeros(max_sequences, np.float32)
        self._frequency: F32 = np.zeros(max_sequences, np.float32)
        self._repetition: F32 = np.ones(max_sequences, np.float32)
        self._outputs: I32 = np.zeros(max_sequences, np.int32)
        self._count_row: I32 = np.full(max_sequences, -1, np.int32)
        self._counts: I32 = np.zeros((0, vocab_size), np.int32)
        self._free_count_rows: list[int] = []
        self._biases: dict[int, Biases] = {}
        self._words: dict[int, _Words] = {}
        self._cached: tuple[bytes, _Rows] | None = None

    def open(self, slot: int, params: SamplingParams, prompt: I32, outputs: I32) -> None:
        """Take a sequence in; `outputs` are tokens it has generated already (after a preemption), usually none.

        Raises ValueError for a slot in use or a biased token outside the vocabulary, IndexError for a prompt token.
        """
        if self._open[slot]:
            raise ValueError(f"slot {slot} is in use")
        biases = self._biases_of(params)
        counts = None
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            counts = np.bincount(outputs, minlength=self.vocab_size)
            counts[prompt] |= IN_PROMPT
        # What can be refused has been: from here on nothing fails half way.
        greedy = params.temperature < GREEDY_BELOW
        self._temperature[slot] = 0.0 if greedy else params.temperature
        self._top_p[slot] = 1.0 if greedy else params.top_p
        self._top_k[slot] = 0 if greedy or not 0 < params.top_k < self.vocab_size else params.top_k
        self._min_p[slot] = 0.0 if greedy else params.min_p
        self._seed[slot] = params.seed
        self._logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self._prompt_logprobs[slot] = params.prompt_logprobs or 0
        self._presence[slot] = params.presence_penalty
        self._frequency[slot] = params.frequency_penalty
        self._repetition[slot] = params.repetition_penalty
        self._outputs[slot] = len(outputs)
        if biases.size:
            self._biases[slot] = biases
        if words := tuple(word for word in params.bad_words if len(word) > 1):
            longest = max(map(len, words)) - 1
            self._words[slot] = _Words(words, deque(outputs[-longest:].tolist(), longest))
        if counts is not None:
            row = self._take_count_row()
            self._count_row[slot] = row
            self._counts[row] = counts
        self._open[slot] = True
        self._cached = None

    def close(self, slot: int) -> None:
        """Forget a sequence: finished, cancelled or preempted. Raises ValueError for a slot that is not in use."""
        if not self._open[slot]:
            raise ValueError(f"slot {slot} is not in use")
        self._open[slot] = False
        if self._count_row[slot] >= 0:
            self._free_count_rows.append(int(self._count_row[slot]))
            self._count_row[slot] = -1
        self._biases.pop(slot, None)
        self._words.pop(slot, None)

    def append(self, slots: I32, tokens: I32) -> None:
        """Sampled tokens became part of these sequences' outputs; a slot may occur several times.

        Raises ValueError for a token outside the vocabulary: a failed row's -1 is no output.
        """
        if not slots.size:
            return
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise ValueError("a token outside the vocabulary cannot be an output")
        np.add.at(self._outputs, slots, 1)
        rows = self._count_row[slots]
        if rows.max() >= 0:
            counted = rows >= 0
            np.add.at(self._counts, (rows[counted], tokens[counted]), 1)
        if self._words:
            for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
                if slot in self._words:
                    self._words[slot].tail.append(token)

    def batch(
        self,
        slots: I32,
        positions: I32,
        targets: I32,
        mask: U32 | None = None,
        mask_row: I32 | None = None,
        drafts: Mapping[int, I32] = NO_DRAFTS,
    ) -> SamplingBatch:
        """The parameters of one step: for each logit row its slot, the index in the sequence of the token being chosen,
        and the target, -1 to sample; `mask` and `mask_row` as in `SamplingBatch`; `drafts` has for each row behind
        drafted tokens what these are.

        The batch refers to `positions`, `targets` and the masks. The first two must not be changed; the masks may be
        filled until the step runs.
        """
        if targets.size and targets.max() >= 0:
            rows = self._gather(slots, positions, targets)
        else:
            key = slots.tobytes()
            if self._cached is None or self._cached[0] != key:
                self._cached = (key, self._gather(slots, positions, targets))
            rows = self._cached[1]
        kept = rows.sampling
        if self._words or not rows.lasting:
            kept = replace(kept, **_columns(self._holding(rows.biases, slots, targets, drafts)))
        count_row = None if kept.count_row is None else self._count_drafts(kept.count_row, drafts)
        return replace(
            kept,
            position=positions,
            target=targets,
            counts=None if count_row is None else self._counts,
            count_row=count_row,
            mask=mask,
            mask_row=mask_row,
        )

    def _gather(self, slots: I32, positions: I32, targets: I32) -> _Rows:
        sampling = targets < 0
        row_logprobs = np.where(sampling, self._logprobs[slots], self._prompt_logprobs[slots])
        count_row = np.where(sampling, self._count_row[slots], np.int32(-1))
        penalised = bool(count_row.size) and count_row.max() >= 0
        wanted = enumerate(slots.tolist() if self._biases else ())
        found = [(row, self._biases[slot]) for row, slot in wanted if slot in self._biases and sampling[row]]
        biases = np.concatenate([np.zeros(0, BIAS), *(own for _, own in found)])
        biases["row"] = np.repeat(np.array([row for row, _ in found], np.int32), [len(own) for _, own in found])
        num_logprobs = int(row_logprobs.max(initial=-1))
        sampling_batch = SamplingBatch(
            temperature=self._temperature[slots],
            top_p=self._top_p[slots],
            top_k=self._top_k[slots],
            min_p=self._min_p[slots],
            seed=self._seed[slots],
            position=positions,
            target=targets,
            num_logprobs=num_logprobs,
            row_logprobs=row_logprobs if num_logprobs >= 0 else None,
            presence=self._presence[slots] if penalised else None,
            frequency=self._frequency[slots] if penalised else None,
            repetition=self._repetition[slots] if penalised else None,
            count_row=count_row if penalised else None,
            **_columns(biases),
        )
        return _Rows(sampling_batch, biases, bool((biases["until"] == ALWAYS).all()))

    def _holding(self, biases: Biases, slots: I32, targets: I32, drafts: Mapping[int, I32]) -> Biases:
        """Of these, what still holds, with those against completing a bad word, in the order of the rows."""
        outputs = self._outputs[slots[biases["row"]]]
        if drafts:
            outputs = outputs + np.array([len(drafts.get(row, ())) for row in biases["row"].tolist()], np.int32)
        against = [
            (row, token)
            for row, slot in enumerate(slots.tolist())
            if slot in self._words and targets[row] < 0
            for token in self._words[slot].completing(drafts.get(row, ()))
        ]
        added = _made([token for _, token in against], BAD_WORD_BIAS)
        added["row"] = [row for row, _ in against]
        together = np.concatenate([biases[outputs < biases["until"]], added])
        return together[together["row"].argsort(kind="stable")]

    def _count_drafts(self, count_row: I32, drafts: Mapping[int, I32]) -> I32:
        """`count_row` with rows of their own for the rows behind drafts. They are free again at once: nobody takes one
        before the step is over."""
        taken: list[int] = []
        count_row = count_row.copy() if drafts else count_row
        for row, tokens in drafts.items():
            if count_row[row] >= 0:
                taken.append(self._take_count_row())
                self._counts[taken[-1]] = self._counts[count_row[row]]
                np.add.at(self._counts[taken[-1]], tokens, 1)
                count_row[row] = taken[-1]
        self._free_count_rows += reversed(taken)
        return count_row

    def _biases_of(self, params: SamplingParams) -> Biases:
        """logit_bias, bad words of one token and all that is not allowed for good, and eos and stop tokens forbidden
        until min_tokens: unless nothing else is allowed, for then they have to be chosen, and do not end anything."""
        singles = [word[0] for word in params.bad_words if len(word) == 1]
        biased_tokens = (token for token, _ in params.logit_bias)
        for token in chain(biased_tokens, params.allowed_token_ids or (), *params.bad_words):
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token {token} is outside the vocabulary of {self.vocab_size}")
        forbidden: set[int] = set()
        if params.min_tokens > 0:
            forbidden = {t for t in (*self._eos, *params.stop_token_ids) if 0 <= t < self.vocab_size}
        never = np.empty(0, np.int32)
        if params.allowed_token_ids is not None:
            outside = np.ones(self.vocab_size, np.bool_)
            outside[list(params.allowed_token_ids)] = False
            never = np.flatnonzero(outside).astype(np.int32)
            if forbidden.issuperset(params.allowed_token_ids):
                forbidden = set()
        biased, values = [token for token, _ in params.logit_bias], [value for _, value in params.logit_bias]
        return np.concatenate(
            [
                _made(biased, values),
                _made(singles, BAD_WORD_BIAS),
                _made(sorted(forbidden), -np.inf, until=params.min_tokens),
                _made(never, -np.inf),
            ]
        )

    def _take_count_row(self) -> int:
        if not self._free_count_rows:
            old = len(self._counts)
            new = max(min(2 * old, old + len(self._open)), FIRST_COUNT_ROWS)
            grown = np.zeros((new, self.vocab_size), np.int32)
            grown[:old] = self._counts
            self._counts = grown
            self._free_count_rows = list(range(new - 1, old - 1, -1))
        return self._free_count_rows.pop()


def _made(tokens: Sequence[int] | I32, values: npt.ArrayLike, until: int = ALWAYS) -> Biases:
    biases = np.zeros(len(tokens), BIAS)
    biases["token"], biases["value"], biases["until"] = tokens, values, until
    return biases


def _columns(biases: Biases) -> dict[str, Any]:
    """As a `SamplingBatch` has them."""
    return {f"bias_{name}": biases[name].copy() if biases.size else None for name in ("row", "token", "value")}
