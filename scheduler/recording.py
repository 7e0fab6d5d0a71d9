"""Every decision of a run in a file, with all it was made from, and the same decisions taken again from that file.

`plan` depends on the requests, the tokens they got, and the state of the KV store, which in turn depends on nothing but
the calls it got. So a recording holds what came from outside, in order, and for each step what was decided: who was
admitted with how much from the cache, who was preempted, which rows were computed, what was evicted. Replaying needs no
model; it is the scheduler and the store themselves, over the recorded tokens.

A line is a JSON object: `start`, `submit`, `end` (a cancelled request or choice), `plan`, `drafts`, `output`, `failed`
(a step), `finish`, `pin`, `unpin`, `reset`. Prompts are in it: the file is readable by its owner alone. Owned by the
engine's task. A replay starts with an empty cache, and cannot follow a constraint that broke.
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np

from kvstore.store import KVStore
from kvstore.tier import HostTier
from models.base import StepOutput
from models.sampling import SamplingParams
from models.sampling_state import SamplingState
from scheduler.apply import apply
from scheduler.batch import Step, build
from scheduler.drafted import Drafted, branch, release
from scheduler.errors import StepFailed
from scheduler.journal import Journal
from scheduler.limits import Limits
from scheduler.plan import StepPlan, plan
from scheduler.proposers.base import Ask, Draft
from scheduler.request import I32, Request, Sequence
from scheduler.requests import Requests
from scheduler.state import State

VOCABULARY = 1 << 30  # any token id
TOP = 64  # alternatives that the logprobs of a replayed step have; more than can be asked for


class Recorder:
    """Writes the lines. Raises OSError."""

    def __init__(self, path: Path, kv: KVStore, limits: Limits) -> None:
        self._file: IO[str] = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w")
        self._kv = kv
        slots = 0 if kv.tier is None else len(kv.tier.memory)
        store = {"num_pages": kv.pools[0].total, "page_size": kv.page_size, "max_sequences": len(kv.tables.rows[0])}
        self.note("start", limits=asdict(limits), store=store, slots=slots)

    def note(self, kind: str, **data: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **data}) + "\n")

    def submit(self, request: Request) -> None:
        params = {"max_tokens": request.params.max_tokens, "prompt_logprobs": request.params.prompt_logprobs}
        fields = {"n": request.n, "priority": request.priority, "namespace": request.namespace, "owner": request.owner}
        self.note("submit", id=request.id, prompt=request.prompt.tolist(), params=params, **fields)

    def finish(self, sequence: Sequence, reason: str) -> None:
        self.note("finish", id=sequence.request.id, choice=sequence.index, reason=reason, known=sequence.known)

    def plan(self, planned: StepPlan, costs: list[float]) -> None:
        """`costs` are those of the second tier before planning."""
        self.note("plan", costs=costs, decisions=decisions_of(planned, self._kv))
        self._file.flush()

    def drafts(self, asks: list[Ask], taken: list[Drafted]) -> None:
        """Which pages were reserved for drafts, and what was drafted."""
        asked = [[ask.sequence.request.id, ask.sequence.index, ask.tokens] for ask in asks]
        paths = [[d.sequence.request.id, d.sequence.index, [path.tolist() for path in d.draft.paths]] for d in taken]
        self.note("drafts", asked=asked, paths=paths)

    def close(self) -> None:
        self._file.close()


def costs_of(kv: KVStore) -> list[float]:
    """What the second tier decides by; empty without one."""
    return [] if kv.tier is None else [kv.tier.costs.store_page, kv.tier.costs.load_page, kv.tier.costs.compute_token]


def decisions_of(planned: StepPlan, kv: KVStore) -> dict[str, Any]:
    """What a plan decided, as JSON has it. The evictions are the last ones, of this plan and of those before."""
    rows = zip(planned.sequences, planned.rows, strict=True)
    return {
        "admitted": [[s.request.id, s.index, s.computed, s.restored] for s in planned.admitted],
        "preempted": [[s.request.id, s.index, computed] for s, computed in planned.preempted],
        "rows": [[s.request.id, s.index, count] for s, count in rows],
        "waiting": planned.waiting_reasons,
        "evicted": [[e.tick, e.start, e.end, list(e.freed), e.kept, e.reason] for e in kv.evictions()[-16:]],
    }


def replay(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """What was decided, and what is decided now, plan by plan. Raises ValueError for a file that is no recording."""
    lines = _whole_lines(path.read_text())
    if not lines or lines[0].get("kind") != "start":
        raise ValueError(f"{path} is not a recording")
    again = _Replay(lines[0], _own_ends(lines))
    for line in lines[1:]:
        kind = line.pop("kind")
        if kind != "drafts":
            again.build()
        if kind == "plan":
            yield line["decisions"], again.plan(line["costs"])
        elif kind != "finish":
            getattr(again, kind)(**line)


def _whole_lines(text: str) -> list[dict[str, Any]]:
    """The lines, without a last one that was being written when the daemon was killed."""
    *lines, last = text.splitlines() or [""]
    whole = [json.loads(line) for line in lines]
    try:
        return [*whole, json.loads(last)]
    except json.JSONDecodeError:
        if not whole:
            raise
        return whole


def _own_ends(lines: list[dict[str, Any]]) -> dict[tuple[str, int], int]:
    """The tokens at which a choice ended by itself: at a stop token, at its length or at the end of a grammar."""
    ended: set[tuple[str, int | None]] = set()
    ends = {}
    for line in lines:
        if line["kind"] == "end":
            ended.add((line["id"], line["choice"]))
        elif line["kind"] == "finish" and line["reason"] in ("stop", "length"):
            choice = line["id"], line["choice"]
            if choice not in ended and (line["id"], None) not in ended:
                ends[choice] = line["known"]
    return ends


class _Replay:
    """The scheduler without an engine. Methods are named after the lines they repeat."""

    def __init__(self, start: dict[str, Any], ends: dict[tuple[str, int], int]) -> None:
        self._limits = limits = Limits(**start["limits"])
        size = start["store"]["page_size"]
        tier = HostTier(np.empty((start["slots"], 0), np.uint8), size) if start["slots"] else None
        caching = limits.prefix_caching
        self._kv = KVStore(**start["store"], max_model_len=limits.max_model_len, prefix_caching=caching, tier=tier)
        self._state = State(self._kv, SamplingState(limits.max_num_seqs, VOCABULARY, ()), limits)
        self._requests = Requests(self._state, Journal(1, 1), lambda: 0.0, ())
        self._ends = ends
        self._planned: StepPlan | None = None
        self._step: Step | None = None

    def submit(self, id: str, prompt: list[int], params: dict[str, Any], namespace: Hashable, **fields: Any) -> None:
        parameters = SamplingParams(seed=0, ignore_eos=True, **params)
        self._requests.open(Request(id, np.array(prompt, np.int32), parameters, namespace=namespace, **fields))
        if id in self._requests:
            for choice in self._requests[id].choices:
                choice.known_limit = self._ends.get((id, choice.index), choice.known_limit)

    def end(self, id: str, choice: int | None) -> None:
        self._requests.end(id, choice, "cancelled" if choice is None else "stop")

    def plan(self, costs: list[float]) -> dict[str, Any]:
        if self._kv.tier is not None:
            measured = self._kv.tier.costs
            measured.store_page, measured.load_page, measured.compute_token = costs
        planned = plan(self._state, self._limits.max_num_batched_tokens)
        decided = decisions_of(planned, self._kv)
        for sequence, error in planned.failed:
            self._requests.fail(sequence.request.id, StepFailed(str(error)), keep=False)
        if planned.failed:
            planned.drop_ended()
        self._step, self._planned = None, planned if planned.sequences else None
        self._requests.step_in_flight = self._planned is not None
        return decided

    def drafts(self, asked: list[tuple[str, int, int]], paths: list[tuple[str, int, list[list[int]]]]) -> None:
        if self._planned is None:
            raise ValueError("the recording has drafts where the replay has no step")
        for id, choice, tokens in asked:
            sequence = self._requests[id].choices[choice]
            if sequence.kv is not None:
                self._kv.reserve(sequence.kv, sequence.computed + 1 + tokens)
        for id, choice, drafted in paths:
            draft = Drafted(self._requests[id].choices[choice], Draft([_array(path) for path in drafted]))
            if len(drafted) > 1:
                draft.forks = branch(self._state, draft)
            self._planned.drafts.append(draft)

    def build(self) -> None:
        """What the engine does between a plan, its drafts and whatever comes next."""
        if self._planned is not None:
            self._step, self._planned = build(self._planned, self._state), None

    def output(self, tokens: list[int]) -> None:
        step, self._requests.step_in_flight = self._step, False
        if step is None:
            raise ValueError("the recording has an output where the replay has no step")
        zeros = np.zeros((len(tokens), TOP), np.float32)
        result = StepOutput(np.array(tokens, np.int32), zeros[:, 0], zeros.astype(np.int32), zeros)
        apply(step, result, self._state, self._requests, 0.0)

    def failed(self) -> None:
        self._requests.step_in_flight = False
        if self._step is not None:
            release(self._state, self._step.plan.drafts)
        for sequence in self._step.plan.sequences if self._step is not None else []:
            self._requests.fail(sequence.request.id, StepFailed(), keep=False)
        self._requests.finish_ending()
        self._kv.reset()

    def pin(self, tokens: list[int], namespace: Hashable) -> None:
        self._kv.pin(_array(tokens), namespace)

    def unpin(self, number: int) -> None:
        self._kv.unpin(self._kv.pins[number])

    def reset(self) -> None:
        self._kv.reset()


def _array(tokens: list[int]) -> I32:
    return np.array(tokens, np.int32)
