"""What a finished step means for its sequences. Owned by the engine's task, between steps.

An error in one sequence's part ends that request and no other.
"""

from __future__ import annotations

import logging
from itertools import islice

import numpy as np
import numpy.typing as npt

from models.base import StepOutput
from scheduler.batch import Step
from scheduler.drafted import adopt, release
from scheduler.errors import ConstraintFailed, NonFiniteLogits, NothingAllowed, SequenceFailed
from scheduler.request import Sequence, Status
from scheduler.requests import Requests
from scheduler.state import State
from scheduler.stream import TokenLogprob

logger = logging.getLogger(__name__)


def apply(step: Step, output: StepOutput, state: State, requests: Requests, now: float) -> None:
    """Advance every sequence of the step, fork, hand out tokens and logprobs, and finish what is finished."""
    for sequence, rows in zip(step.plan.sequences, step.plan.rows, strict=True):
        sequence.computed += rows
        if sequence.kv is not None:
            sequence.kv.computed = sequence.computed
    for sequence, first, rows in step.scored:
        try:
            _score(sequence, first, rows, output, requests)
        except Exception as error:
            _fail(sequence, error, requests)
    without_pages: list[Sequence] = []
    for parent in step.parents:
        without_pages += _fork(parent, state, requests, now)
    read = step.sampled_rows if not step.plan.drafts else _settle_drafts(step, output, state)
    if step.sampled:
        counts = [1 + step.accepted.get(sequence, 0) for sequence in step.sampled]
        tokens = output.tokens[read]
        slots = np.repeat(np.array([sequence.slot for sequence in step.sampled], np.int32), counts)
        taken = (tokens >= 0) & (slots >= 0)
        state.sampling.append(slots[taken], tokens[taken])
        given = zip(read.tolist(), tokens.tolist(), strict=True)
        for sequence, count in zip(step.sampled, counts, strict=True):
            for place, (row, token) in enumerate(islice(given, count)):
                if sequence.finish_requested is not None or sequence.status is not Status.RUNNING:
                    continue
                try:
                    if place:  # the token before this one was drafted, so that it has been computed
                        sequence.computed += 1
                        if sequence.kv is not None:
                            sequence.kv.computed = sequence.computed
                    if place < count - 1:
                        step.accepted[sequence] = place + 1  # no further when this one ends the text
                        sequence.accepted_tokens += 1
                    if step.masks is not None and row in step.masks.errors:
                        raise step.masks.errors[row]
                    _take(sequence, token, row, step, output, requests, now)
                except Exception as error:
                    _fail(sequence, error, requests)
    if state.limits.prefix_caching:
        for sequence, rows in zip(step.plan.sequences, step.plan.rows, strict=True):
            # Output tokens reach the tree when the sequence ends: nobody can need them before.
            if (rows > 1 or sequence.computed <= sequence.prompt_length) and sequence.kv is not None:
                try:
                    state.kv.commit(sequence.kv, sequence.tokens, sequence.computed)
                except Exception as error:
                    _fail(sequence, error, requests)
    for sequence in without_pages:
        if sequence.status is Status.RUNNING:
            state.preempt(sequence)
    requests.finish_ending()


def _settle_drafts(step: Step, output: StepOutput, state: State) -> npt.NDArray[np.intp]:
    """Find what is accepted of each draft, let the sequence have the pages of that path, and give back the others.

    Returns the logit rows to be read: for each sampled sequence its accepted ones and the one that follows."""
    starts: dict[Sequence, int] = {}
    for drafted in step.plan.drafts:
        path, step.accepted[drafted.sequence] = drafted.best(output)
        starts[drafted.sequence] = drafted.rows[path]
        drafted.sequence.drafted_tokens += sum(map(len, drafted.draft.paths))
        adopt(drafted, path)
    release(state, step.plan.drafts)
    spans = [
        np.arange(first := starts.get(sequence, row), first + 1 + step.accepted.get(sequence, 0), dtype=np.intp)
        for sequence, row in zip(step.sampled, step.sampled_rows.tolist(), strict=True)
    ]
    return np.concatenate(spans) if spans else step.sampled_rows


def _fail(sequence: Sequence, error: Exception, requests: Requests) -> None:
    if isinstance(error, ConstraintFailed):
        requests.fail(sequence.request.id, error)
        return
    logger.exception("handling %r failed", sequence, exc_info=error)
    requests.fail(sequence.request.id, SequenceFailed(f"{type(error).__name__}: {error}"), keep=False)


def _score(sequence: Sequence, first: int, rows: int, output: StepOutput, requests: Requests) -> None:
    """Report the logprobs of prompt tokens, and finish a request that wanted nothing else."""
    if sequence.status is not Status.RUNNING or sequence.finish_requested is not None:
        return
    wanted = sequence.params.prompt_logprobs
    assert wanted is not None
    scores = [_logprob(output, row, wanted) for row in range(first, first + rows)]
    sequence.scored += rows
    active = requests[sequence.request.id]
    active.stream.put_prompt_logprobs(sequence.index, scores)
    if sequence.params.max_tokens == 0 and sequence.computed >= sequence.goal:
        for choice in reversed(active.choices):
            requests.finish(choice, "length")


def _fork(parent: Sequence, state: State, requests: Requests, now: float) -> list[Sequence]:
    """Set the other choices going; returns those that got no pages."""
    without_pages = []
    if parent.status is Status.RUNNING:
        life = requests[parent.request.id].life
        for child in parent.forks:
            if child.status is Status.FORKING and child.finish_requested is None:
                child.cached_tokens, child.admitted_at = parent.cached_tokens, parent.admitted_at
                if not state.fork(parent, child):
                    without_pages.append(child)
                life.note(now, "forked", child.index, computed=child.computed)
        state.scatter(parent)
    return without_pages


def _take(
    sequence: Sequence, token: int, row: int, step: Step, output: StepOutput, requests: Requests, now: float
) -> None:
    """Add one sampled token, and finish the sequence if it is the last."""
    active = requests[sequence.request.id]
    constraint = sequence.constraint
    if step.masks is not None and row in step.masks.finished:  # nothing may follow: the token means nothing
        requests.finish(sequence, "stop")
        return
    if token < 0:
        error = NonFiniteLogits("the model's logits are not finite") if constraint is None else NothingAllowed()
        requests.fail(sequence.request.id, error, keep=False)
        return
    generated = sequence.known - sequence.prompt_length
    sequence.append(token)
    if generated == 0:
        sequence.first_token_at = now
        if active.life.first_token_at is None:
            active.life.first_token_at = now
        active.life.note(now, "first token", sequence.index)
    params = sequence.params
    if token in sequence.stop_ids and generated >= params.min_tokens:
        requests.finish(sequence, "stop", stop_token=token)
        return
    logprob = None if params.logprobs is None else _logprob(output, row, params.logprobs)
    active.stream.put_token(sequence.index, token, logprob, sequence.cached_tokens)
    if constraint is not None:
        constraint.accept(token)
        if constraint.finished:
            requests.finish(sequence, "stop")
            return
    if sequence.known >= sequence.known_limit:
        requests.finish(sequence, "length")


def _logprob(output: StepOutput, row: int, wanted: int) -> TokenLogprob:
    assert output.logprobs is not None
    logprob = float(output.logprobs[row])
    if not wanted:
        return TokenLogprob(logprob, ())
    assert output.top_ids is not None
    assert output.top_logprobs is not None
    ids, logprobs = output.top_ids[row, :wanted].tolist(), output.top_logprobs[row, :wanted].tolist()
    return TokenLogprob(logprob, tuple(zip(ids, logprobs, strict=True)))
