"""How much processor time the event loop's thread spends in each of its jobs, and how long threads wait.

For a profile only: chosen functions are wrapped with two readings of the thread's own clock, which stands still while
the thread waits for a core or for the interpreter's lock. Nothing of this is there when a daemon is not profiled.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INTERVAL_SECONDS = 0.001

# What the event loop's thread does in a step: (module, function, what it is called). None of them calls another one.
JOBS = (
    ("scheduler.engine", "plan", "plan"),
    ("scheduler.engine", "build", "build the batch"),
    ("scheduler.engine", "apply", "apply"),
    ("server.metrics", "Metrics.on_step", "metrics of the step"),
    ("server.choice", "Choice.take", "detokenise, stop strings"),
    ("server.generation", "Generation._observe", "metrics of the token"),
    ("server.replies.chunks", "ChunkWriter.events", "JSON and events"),
    ("uvicorn.protocols.http.httptools_impl", "RequestResponseCycle.send", "write to sockets"),
    ("uvicorn.protocols.http.httptools_impl", "HttpToolsProtocol.data_received", "read requests"),
)


@contextmanager
def timed_jobs(jobs: Sequence[tuple[str, str, str]] = JOBS) -> Iterator[dict[str, float]]:
    """Seconds by job, which grow for as long as the block lasts. Raises AttributeError where a function is missing."""
    seconds = dict.fromkeys((name for _, _, name in jobs), 0.0)
    with contextlib.ExitStack() as wrapped:
        for module, path, name in jobs:
            *outer, last = path.split(".")
            owner = functools.reduce(getattr, outer, importlib.import_module(module))
            function = getattr(owner, last)
            setattr(owner, last, _timed(function, seconds, name))
            wrapped.callback(setattr, owner, last, function)
        yield seconds


def _timed(function: Callable[..., Any], seconds: dict[str, float], name: str) -> Callable[..., Any]:
    @contextmanager
    def clock() -> Iterator[None]:
        began = time.thread_time()
        try:
            yield
        finally:
            seconds[name] += time.thread_time() - began

    if not inspect.iscoroutinefunction(function):
        return clock()(function)

    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        with clock():
            return await function(*args, **kwargs)

    return call


class Sleeper(threading.Thread):
    """A thread that wakes a thousand times a second and notes how late: that is how long any thread with something to
    do waits for a core and for the interpreter's lock."""

    def __init__(self) -> None:
        super().__init__(name="octavo-sleeper", daemon=True)
        self.late_seconds: list[float] = []
        self._stopping = threading.Event()

    def run(self) -> None:
        while not self._stopping.is_set():
            due = time.perf_counter() + INTERVAL_SECONDS
            time.sleep(INTERVAL_SECONDS)
            self.late_seconds.append(time.perf_counter() - due)

    def stop(self) -> None:
        self._stopping.set()
        self.join()


def thread_times(thread: int) -> tuple[float, float] | None:
    """Seconds that a thread (by the system's number) has computed, and has waited for a core; None where the system
    does not tell."""
    try:
        computed, waited, *_ = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
        return int(computed) / 1e9, int(waited) / 1e9
    except (OSError, ValueError):
        return None
