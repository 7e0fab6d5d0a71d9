"""Whether the next step waits a moment for requests that are about to come.

A step takes tens of milliseconds, and who comes just after it has begun waits for all of it. Two kinds of requests are
worth a few milliseconds of everybody: those whose prompts are being tokenised, and those of clients that ask again as
soon as they are answered, which would come just too late every time. For these a step that follows the end of an answer
waits, as long as they have come in a fair part of such waits. Owned by the engine's task, apart from `expect` and
`came`, which only count.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

EXPECTED_SECONDS = 0.005  # at most, for those known to be on their way
RETURN_SECONDS = 0.004  # for a client to read the end of its answer and to ask again
WORTH_STEPS = 2  # a step is worth such a wait when it takes as long as so many of them
WORTH_SHARE = 0.25  # of those who could have returned
TRY_EVERY = 16  # a wait that has not been worth it is tried again so often

_WEIGHT = 1 / 8  # of the last wait in the share


class Newcomers:
    """Who is expected, and whether waiting for those who may return has been worth it."""

    def __init__(self) -> None:
        self._expected = 0
        self._until = 0.0  # when those who are still expected were refused, or take longer than is waited for
        self._came = 0  # or became expected, since the wait began
        self._moved = asyncio.Event()
        self._share = 1.0  # that returned, of those who could; the last waits count most
        self._passed_over = 0

    def expect(self) -> None:
        """A request is there whose prompt is not known yet."""
        now = time.monotonic()
        if now >= self._until:
            self._expected = 0
        self._expected += 1
        self._until = now + EXPECTED_SECONDS
        self._came += 1
        self._moved.set()

    def came(self) -> None:
        """A request has been queued, expected or not."""
        if self._expected:
            self._expected -= 1
        else:
            self._came += 1
        self._moved.set()

    async def wait(self, ended: int, step_seconds: float) -> None:
        """Return when there is nobody to wait for any more; `ended` answers ended with the last step, which took
        `step_seconds`."""
        self._came = 0
        if ended and step_seconds >= WORTH_STEPS * RETURN_SECONDS and self._worth_it():
            await self._wait(RETURN_SECONDS, lambda: self._came < ended)
            self._share += _WEIGHT * (min(1.0, self._came / ended) - self._share)
        if self._expected:
            await self._wait(self._until - time.monotonic(), lambda: self._expected > 0)
            self._expected = 0

    def _worth_it(self) -> bool:
        self._passed_over += 1
        if self._share >= WORTH_SHARE or self._passed_over >= TRY_EVERY:
            self._passed_over = 0
            return True
        return False

    async def _wait(self, seconds: float, wanting: Callable[[], bool]) -> None:
        if seconds <= 0:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while wanting():
                    self._moved.clear()
                    await self._moved.wait()
