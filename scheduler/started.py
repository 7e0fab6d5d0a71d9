"""Steps of a runner with threads of its own, as futures: no other thread of Python's takes part in them.

A thread that is lent to a step has to win the interpreter's lock twice, from an event loop that is busy with the step
before. Here the loop itself starts the step, in microseconds, and an eventfd wakes it at the end. Linux only.
Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from models.base import Batch, StartingRunner, StepOutput


class StartedSteps:
    """One step at a time."""

    def __init__(self, runner: StartingRunner) -> None:
        self._runner = runner
        self._loop = asyncio.get_running_loop()
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._running: tuple[asyncio.Future[StepOutput], Callable[[], StepOutput]] | None = None
        self._loop.add_reader(self._descriptor, self._done)

    def begin(self, batch: Batch) -> asyncio.Future[StepOutput]:
        future: asyncio.Future[StepOutput] = self._loop.create_future()
        self._running = future, self._runner.start(batch, self._descriptor)
        return future

    def _done(self) -> None:
        os.eventfd_read(self._descriptor)
        if self._running is not None:
            (future, output), self._running = self._running, None
            if not future.done():
                future.set_result(output())

    def close(self) -> None:
        """Let go of the descriptor, unless a step that nobody waits for any more is still going to use it."""
        self._loop.remove_reader(self._descriptor)
        if self._running is None:
            os.close(self._descriptor)
