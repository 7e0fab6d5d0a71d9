"""What plans and steps did, as the journal has it. Called by the engine's task, between steps."""

from __future__ import annotations

from kvstore.store import KVStore
from scheduler.batch import Step
from scheduler.journal import Journal, StepRecord
from scheduler.plan import StepPlan
from scheduler.requests import Requests
from scheduler.state import State


def note_moves(planned: StepPlan, requests: Requests, kv: KVStore, now: float) -> None:
    """Write what a plan did into the lives of the requests."""
    for sequence, computed in planned.preempted:
        life = requests[sequence.request.id].life
        life.preemptions += 1
        life.note(now, "preempted", sequence.index, computed=computed, pages=-(-computed // kv.page_size))
    for sequence in planned.admitted:
        life = requests[sequence.request.id].life
        kind = "admitted" if sequence.admitted_at is None else "resumed"
        if sequence.admitted_at is None:
            sequence.admitted_at = now
            if sequence.index == 0:
                life.cached_tokens, life.admitted_at = sequence.cached_tokens, now
        detail = {"restored": sequence.restored} if sequence.restored else {}
        cached, tokens, pages = sequence.computed, sequence.goal, -(-sequence.goal // kv.page_size)
        life.note(now, kind, sequence.index, cached=cached, tokens=tokens, pages=pages, **detail)
    for sequence, reason in planned.waits:
        requests[sequence.request.id].life.note(now, "waits", sequence.index, reason=reason)


def record_of(number: int, step: Step, state: State, started: float, planned: float) -> StepRecord:
    """Describe a step that is about to run; planning it began at `started` and ended at `planned`."""
    plan, pairs = step.plan, list(zip(step.plan.sequences, step.plan.rows, strict=True))
    rows = sum(plan.rows)
    decoding = sum(count == 1 and sequence.computed >= sequence.prompt_length for sequence, count in pairs)
    ends = [sequence.computed + count for sequence, count in pairs]
    first = [sequence for sequence in plan.admitted if sequence.index == 0 and not sequence.preemptions]
    stats = state.kv.stats()
    return StepRecord(
        number,
        started,
        plan_seconds=planned - started,
        rows=rows,
        prefill_tokens=rows - decoding,
        decode_rows=decoding,
        context_tokens=sum(ends),
        attended_tokens=sum(
            [count * end - count * (count - 1) // 2 for count, end in zip(plan.rows, ends, strict=True)]
        ),
        sampled_tokens=len(step.sampled),
        cached_tokens=sum([sequence.cached_tokens for sequence in first]),
        sequences=tuple([(sequence.request.id, sequence.index, count) for sequence, count in pairs]),
        admitted=tuple([sequence.request.id for sequence in plan.admitted]),
        preempted=tuple([sequence.request.id for sequence, _ in plan.preempted]),
        running=state.num_running,
        waiting=state.num_waiting,
        waiting_reasons=plan.waiting_reasons,
        pages_free=stats.free,
        pages_evictable=stats.evictable,
        pages_used=stats.used,
    )


def note_drafts(
    record: StepRecord, step: Step, verified: tuple[tuple[str, int, int], ...], journal: Journal, now: float
) -> None:
    """Write what became of a step's drafts into its record and into the lives of the requests."""
    record.drafts = verified
    record.accepted_tokens = sum(accepted for _, _, accepted in verified)
    rows = []
    for drafted in step.plan.drafts:
        sequence, paths = drafted.sequence, [path.tolist() for path in drafted.draft.paths]
        rows.append((sequence.request.id, sequence.index, sum(map(len, paths))))
        if (life := journal.life(sequence.request.id)) is not None:
            life.note_draft(now, sequence.index, paths, step.accepted[sequence])
    record.draft_rows, record.drafted_tokens = tuple(rows), sum(count for _, _, count in rows)
