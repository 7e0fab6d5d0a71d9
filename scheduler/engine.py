"""The engine: takes requests in, runs steps, and never dies of one of them.

One asyncio task owns the scheduler's state; every public method is called on the event loop. The model runs in one
worker thread, or in threads of its own. Applying a step's results and handing over the next step happen back to back,
so that whatever the readers do with their tokens overlaps with the next step's computation. With nothing to do the task
sleeps on an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from kvstore.store import KVStore, Pin
from models.base import Runner, StartingRunner, StepOutput
from models.sampling_state import SamplingState
from scheduler.apply import apply
from scheduler.batch import Step, build
from scheduler.computation import Computation
from scheduler.drafted import Drafted, release
from scheduler.errors import (
    DuplicateRequest,
    Interrupted,
    NeverFits,
    NotAccepting,
    SchedulerError,
    SequenceFailed,
    StepFailed,
)
from scheduler.journal import Journal, StepRecord
from scheduler.limits import Limits
from scheduler.newcomers import Newcomers
from scheduler.notes import note_drafts, note_moves, record_of
from scheduler.plan import StepPlan, plan
from scheduler.proposers.base import Draft
from scheduler.queue_bounds import check_queue
from scheduler.recording import Recorder, costs_of
from scheduler.request import I32, FinishReason, Request, Sequence
from scheduler.requests import Requests
from scheduler.speculation import Speculation
from scheduler.started import StartedSteps
from scheduler.state import State
from scheduler.stream import RequestStream

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_FAILED_STEPS = 3  # in a row, after which the model is taken for broken


class Engine:
    """Serves requests with one runner, one KV store and one sampling state, all of which it owns from `start` on.

    `healthy` False is final: it says that `unhealthy_reason` made it impossible to go on.
    """

    def __init__(
        self,
        runner: Runner,
        kv: KVStore,
        sampling: SamplingState,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        on_step: Callable[[StepRecord], None] | None = None,
        recorder: Recorder | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.limits = limits
        self.journal = Journal(limits.journal_steps, limits.journal_requests)
        self.healthy = True
        self.unhealthy_reason: str | None = None
        self.last_progress = clock()  # when a step last ended, or work last arrived at an idle engine
        self.steps = 0
        self._runner = runner
        self._computation = Computation(runner, kv, rejection=speculation is not None and speculation.rejection)
        self._clock = clock
        self._on_step = on_step
        self._state = State(kv, sampling, limits)
        self._requests = Requests(self._state, self.journal, clock, runner.config.eos_token_ids)
        self._recorder = recorder
        self.speculation = speculation
        if speculation is not None:
            self._state.on_leave = speculation.proposer.forget
        if recorder is not None:
            self._requests.on_end = recorder.finish
        self._accepting = True
        self._stopping = False
        self._failed_steps = 0
        self._new_sequences = 0  # submitted since the last plan
        self._newcomers = Newcomers()
        self._jobs: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._thread = ThreadPoolExecutor(1, "octavo-model")
        self._task: asyncio.Task[None] | None = None
        self._started: StartedSteps | None = None

    # -- for the server -----------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Sequences that hold a slot."""
        return self._state.num_running

    @property
    def waiting(self) -> int:
        """Sequences that wait for one."""
        return self._state.num_waiting

    @property
    def accepting(self) -> bool:
        return self._accepting and self.healthy

    @property
    def context_limit(self) -> int:
        return self._state.context_limit

    @property
    def kv(self) -> KVStore:
        """The store, for whoever wants to know how full it is. Only the engine changes it."""
        return self._state.kv

    @property
    def sequences(self) -> list[Sequence]:
        """Those that have pages, for whoever wants to know. Only the engine changes them."""
        return list(self._state.running)

    @property
    def busy(self) -> bool:
        """Whether a step is being computed."""
        return self._requests.step_in_flight

    @property
    def drain_rate(self) -> float | None:
        """Sequences leaving per second; None before any has."""
        return self._requests.drain_rate.per_second(self._clock())

    def active_of(self, owner: str) -> int:
        """An owner's choices that have not ended."""
        return self._requests.shares.active(owner)

    def start(self) -> None:
        if isinstance(self._runner, StartingRunner) and hasattr(os, "eventfd"):
            self._started = StartedSteps(self._runner)
        self._task = asyncio.get_running_loop().create_task(self._run(), name="engine")

    def check_room(self, owner: str, choices: int, priority: int, prompt_tokens: int = 0) -> None:
        """Raises NotAccepting or QueueFull as `submit` does for such a group; before its prompts are known, for those
        that it would refuse whatever they are. The others are expected to be submitted in a moment."""
        self._check_room(owner, choices, priority, prompt_tokens)
        self._newcomers.expect()

    def _check_room(self, owner: str, choices: int, priority: int, prompt_tokens: int) -> None:
        if not self.accepting:
            raise NotAccepting(self.unhealthy_reason or "the engine is shutting down")
        left_behind, now = self._state.num_waiting > self._new_sequences, self._clock()
        check_queue(
            owner, choices, priority, prompt_tokens, self._state, self._requests, left_behind=left_behind, now=now
        )

    def submit(self, requests: Iterable[Request]) -> list[RequestStream]:
        """Queue a group, all of it or nothing.

        Raises NeverFits, QueueFull, NotAccepting or DuplicateRequest; ValueError for an empty prompt or n < 1.
        """
        group = list(requests)
        seen: set[str] = set()
        for request in group:
            self._check_fits(request)
            if request.id in self._requests or request.id in seen:
                raise DuplicateRequest(f"request {request.id} has not ended")
            seen.add(request.id)
        tokens, choices = sum(len(request.prompt) for request in group), sum(request.n for request in group)
        self._check_room(group[0].owner, choices, group[0].priority, tokens)
        if not len(self._requests):
            self.last_progress = self._clock()
            self._requests.drain_rate.busy(self.last_progress)
            self._empty.clear()
        if self._recorder is not None:
            for request in group:
                self._recorder.submit(request)
        streams = [self._requests.open(request) for request in group]
        self._new_sequences += choices
        self._newcomers.came()
        self._wake.set()
        return streams

    def cancel(self, request_id: str) -> bool:
        """End a request: at once when it waits, before the next step is planned when it runs. False: it has ended."""
        return self._end(request_id, None, "cancelled")

    def stop_choice(self, request_id: str, index: int, reason: FinishReason = "stop") -> bool:
        """End one choice, for a reason the scheduler cannot see, such as a stop string. False: it has ended."""
        return self._end(request_id, index, reason)

    def _end(self, request_id: str, index: int | None, reason: FinishReason) -> bool:
        self._wake.set()
        self._note("end", id=request_id, choice=index)
        return self._requests.end(request_id, index, reason)

    def pin(self, tokens: I32, namespace: Hashable) -> Pin | None:
        """See `KVStore.pin`."""
        self._note("pin", tokens=tokens.tolist(), namespace=namespace)
        return self.kv.pin(tokens, namespace)

    def unpin(self, pin: Pin) -> None:
        self._note("unpin", number=self.kv.pins.index(pin))
        self.kv.unpin(pin)

    def reset_cache(self) -> int:
        """Drop what nobody holds. Returns how many pages became free."""
        self._note("reset")
        if self.speculation is not None:
            self.speculation.reset()
        return self.kv.reset()

    def _note(self, kind: str, **data: Any) -> None:
        if self._recorder is not None:
            self._recorder.note(kind, **data)

    async def between_steps(self, work: Callable[[], T]) -> T:
        """Run `work` in the model's thread while no step runs and the KV store stands still. Raises what it raises,
        and NotAccepting when there are no steps any more."""
        if not self.accepting:
            raise NotAccepting(self.unhealthy_reason or "the engine is shutting down")
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._jobs.append((work, done))
        self._wake.set()
        return await done

    async def until_idle(self) -> None:
        await self._empty.wait()

    async def drain(self, grace_seconds: float) -> bool:
        """Accept nothing new, let what is there finish for at most that long, then stop. True: everything finished."""
        self._accepting = False
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.until_idle(), grace_seconds)
        finished = not len(self._requests)
        await self.stop()
        return finished

    async def stop(self, grace_seconds: float = 5.0) -> None:
        """Stop after the step in flight, or after that long; whatever has not finished gets an Interrupted error."""
        self._accepting = False
        self._stopping = True
        self._wake.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=grace_seconds)
        self._interrupt("the engine was stopped")
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = self._requests.on_end = None
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._started is not None and not self._requests.step_in_flight:  # it keeps what that step reads and writes
            self._started.close()
            self._started = None

    # -- admission to the queue ---------------------------------------------------------------------------------

    def _check_fits(self, request: Request) -> None:
        length = len(request.prompt)
        if not length or request.n < 1:
            raise ValueError(f"request {request.id}: {length} prompt tokens, n = {request.n}")
        limit = self._state.context_limit
        if length + (request.params.max_tokens > 0) > limit:
            by = "max_model_len" if limit == self.limits.max_model_len else "kv_pool"
            raise NeverFits(request.id, length, limit, by)

    # -- the loop -----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await self._loop()
        except Exception as error:
            logger.exception("the engine loop ended")
            self._give_up(f"{type(error).__name__}: {error}")

    async def _loop(self) -> None:
        previous: StepRecord | None = None
        while not self._stopping and self.healthy:
            while self._jobs:
                await self._run_job(*self._jobs.pop(0))
            waited = await self._wait_for_newcomers(previous)
            if self._stopping or not self.healthy:
                break
            started = self._clock()
            step = await self._next_step()
            planned = self._clock()
            if step is None:
                self._publish(previous)
                previous = None
                if not len(self._requests):
                    self._requests.drain_rate.idle(planned)
                    self._empty.set()
                    await self._wake.wait()
                self._wake.clear()
                continue
            self._requests.step_in_flight = True
            future = self._begin(step)
            # From here to the await is work that the model's computation hides.
            self._publish(previous)
            self.steps += 1
            record = previous = record_of(self.steps, step, self._state, started, planned)
            record.wait_seconds = waited
            try:
                await self._finish_step(step, future, record, planned)
            except Exception as error:
                record.error = f"{type(error).__name__}: {error}"
                self._step_failed(step.plan, error)
        self._publish(previous)

    async def _wait_for_newcomers(self, previous: StepRecord | None) -> float:
        """Returns the seconds that took. Nobody is waited for who would not be let in at once."""
        state, began = self._state, self._clock()
        if state.num_waiting > self._new_sequences or not len(self._requests):
            return 0.0
        if previous is None or not state.running:
            await self._newcomers.wait(0, 0.0)
        else:
            await self._newcomers.wait(previous.finished, previous.run_seconds)
        return self._clock() - began

    async def _run_job(self, work: Callable[[], T], done: asyncio.Future[T]) -> None:
        self._requests.step_in_flight = True
        running = asyncio.get_running_loop().run_in_executor(self._thread, work)
        await asyncio.wait({running})
        if done.done():  # nobody waits for it any more
            running.exception()
        elif (error := running.exception()) is not None:
            done.set_exception(error)
        else:
            done.set_result(running.result())
        self._requests.step_in_flight = False
        self._requests.finish_ending()
        self.last_progress = self._clock()

    def _begin(self, step: Step) -> asyncio.Future[StepOutput]:
        """Have a step computed; only one whose work is all in the batch needs no thread of Python's."""
        if self._started is not None and self._computation.is_all_in_the_batch(step):
            return self._started.begin(step.batch)
        return asyncio.get_running_loop().run_in_executor(self._thread, self._computation.run, step)

    async def _finish_step(
        self, step: Step, future: asyncio.Future[StepOutput], record: StepRecord, started: float
    ) -> None:
        try:
            output = await future
        finally:
            self._requests.step_in_flight = False
        if self._stopping and not len(self._requests):  # nobody has waited for it
            return
        ended = self._clock()
        record.run_seconds = ended - started
        if step.masks is not None:
            record.mask_seconds = step.masks.seconds
        before = len(self._requests)
        self._note("output", tokens=output.tokens.tolist())
        apply(step, output, self._state, self._requests, ended)
        if self.speculation is not None and step.plan.drafts:
            verified = self.speculation.verified(step.plan.drafts, step.accepted, output)
            note_drafts(record, step, verified, self.journal, ended)
        self._failed_steps = 0
        record.finished = before - len(self._requests)
        self.last_progress = self._clock()
        record.apply_seconds = self.last_progress - ended

    async def _next_step(self) -> Step | None:
        """Plan, draft and build; None when that left nothing to compute."""
        self._new_sequences = 0
        costs = costs_of(self.kv)
        planned = plan(self._state, self.limits.max_num_batched_tokens)
        if self._recorder is not None:
            self._recorder.plan(planned, costs)
        note_moves(planned, self._requests, self.kv, self._clock())
        for sequence, error in planned.failed:
            if not isinstance(error, SchedulerError):
                logger.error("admitting %r failed", sequence, exc_info=error)
                error = SequenceFailed(f"{type(error).__name__}: {error}")
            self._requests.fail(sequence.request.id, error, keep=False)
        if planned.failed:
            planned.drop_ended()
        if planned.sequences:
            try:
                if self.speculation is not None:
                    planned.drafts = await self._draft(self.speculation, planned)
                return build(planned, self._state)
            except Exception as error:
                self._step_failed(planned, error)
        elif len(self._requests) and not planned.failed and not planned.preempted:
            self._give_up("requests are there, and none of them can run")
        return None

    async def _draft(self, speculation: Speculation, planned: StepPlan) -> list[Drafted]:
        """Guess how the step's sequences go on. A proposer that fails costs its drafts and nothing else."""
        asks = speculation.allot(self._state, planned)
        if not asks:
            return []
        proposer, moves = speculation.proposer, None
        if proposer.runs_model:
            moves = self.kv.drain_moves()
            # Nobody leaves while the proposer reads their pages, just as while a step runs.
            self._requests.step_in_flight = True
        try:
            if proposer.runs_model:
                work = partial(self._computation.propose, proposer, asks, moves)
                drafts = await asyncio.get_running_loop().run_in_executor(self._thread, work)
            else:
                drafts = proposer.propose(asks)
        except Exception:
            logger.exception("drafting by %s failed", proposer.name)
            drafts = [Draft()] * len(asks)
        finally:
            self._requests.step_in_flight = False
        taken = speculation.take(self._state, asks, drafts)
        if self._recorder is not None:  # whatever came of them: their pages have been reserved
            self._recorder.drafts(asks, taken)
        return taken

    def _publish(self, record: StepRecord | None) -> None:
        if record is None:
            return
        self.journal.steps.append(record)
        if self._on_step is not None:
            try:
                self._on_step(record)
            except Exception:
                logger.exception("on_step raised")

    # -- when things go wrong -----------------------------------------------------------------------------------

    def _step_failed(self, planned: StepPlan, error: Exception) -> None:
        """End the requests of a step that raised, and go on if the store is sound."""
        logger.error("a step of %d sequences failed", len(planned.sequences), exc_info=error)
        release(self._state, planned.drafts)
        self._failed_steps += 1
        self._note("failed")
        failure = StepFailed(f"{type(error).__name__}: {error}")
        try:
            for sequence in planned.sequences:
                self._requests.fail(sequence.request.id, failure, keep=False)
            self._requests.finish_ending()
            # Copies into cached pages may have been lost with the step: nothing idle is trusted any more.
            self.kv.reset()
            self.kv.check_integrity()
        except Exception as broken:
            logger.exception("the KV store is not sound after a failed step")
            self._give_up(f"the KV store is not sound: {broken}")
        else:
            if self._failed_steps >= MAX_FAILED_STEPS:
                self._give_up(f"{self._failed_steps} steps in a row failed, the last with {failure}")

    def _give_up(self, reason: str) -> None:
        logger.critical("the engine gives up: %s", reason)
        self.healthy = False
        self.unhealthy_reason = reason
        self._interrupt(reason)

    def _interrupt(self, reason: str) -> None:
        error = Interrupted(reason)
        for _, done in self._jobs:
            if not done.done():
                done.set_exception(NotAccepting(reason))
        self._jobs.clear()
        for request_id in self._requests.ids():
            if self._requests.step_in_flight:  # it reads pages and sampling rows: nothing is given back any more
                self._requests.abandon(request_id, error)
                continue
            try:
                self._requests.fail(request_id, error, keep=False)
            except Exception:
                logger.exception("request %s could not be ended cleanly", request_id)
                self._requests.abandon(request_id, error)
        self._empty.set()
