"""Notices that nothing moves any more, says where everything stands, and ends the process for its supervisor.

Three things end it: the engine has given up, no step has ended for too long while there is work, or the event loop has
not run for too long. A thread of its own watches, because any other may be the one that is stuck.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import sys
import threading
import time
from typing import TYPE_CHECKING

from server.supervisor import COULD_NOT_GO_ON, leave, tell

if TYPE_CHECKING:
    from scheduler.engine import Engine

logger = logging.getLogger("octavo")

MAX_INTERVAL_SECONDS = 1.0
FLUSH_SECONDS = 1.0  # for the error events of what is broken off


class Watchdog:
    """Watches from `start` to `stop`. Times are of the engine's clock, `time.monotonic`."""

    def __init__(self, engine: Engine, timeout_seconds: float) -> None:
        self._engine = engine
        self._timeout_seconds = timeout_seconds
        self._stopped = threading.Event()
        self._resumed_at = 0.0  # after the last pause of the whole process

    def start(self) -> None:
        """In the event loop that is to be watched."""
        self._loop = asyncio.get_running_loop()
        self._beat_at = time.monotonic()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._stopped.wait(min(MAX_INTERVAL_SECONDS, self._timeout_seconds / 4)):
            now = time.monotonic()
            if now - before > self._timeout_seconds / 2:
                # This thread has not run either: the process was paused, as frozen containers and machines that are
                # moved are. Nobody had the time to get on.
                self._resumed_at = now
            before = now
            with contextlib.suppress(RuntimeError):  # the loop has just been closed
                self._loop.call_soon_threadsafe(self._beat)
            if (reason := self._why_to_end()) is not None:
                self._end(reason)

    def _beat(self) -> None:
        self._beat_at = time.monotonic()
        tell("WATCHDOG=1")

    def _why_to_end(self) -> str | None:
        engine, now = self._engine, time.monotonic()
        if not engine.healthy:
            return f"the engine has given up: {engine.unhealthy_reason}"
        silent, stuck = (now - max(last, self._resumed_at) for last in (self._beat_at, engine.last_progress))
        if silent > self._timeout_seconds:
            return f"the event loop has not run for {silent:.0f} s"
        if (engine.running or engine.waiting) and stuck > self._timeout_seconds:
            return f"no step has ended for {stuck:.0f} s"
        return None

    def _end(self, reason: str) -> None:
        logger.critical("%s; every thread's stack follows, then the process ends", reason)
        faulthandler.dump_traceback(sys.stderr)
        # Clients get an error instead of silence, if the event loop can still tell them.
        stopping = asyncio.run_coroutine_threadsafe(self._engine.stop(grace_seconds=0.0), self._loop)
        with contextlib.suppress(Exception):
            stopping.result(FLUSH_SECONDS)
            time.sleep(FLUSH_SECONDS)
        leave(COULD_NOT_GO_ON)
