"""`octavo profile`: serve a standard request set in this process and say where each millisecond of a step went.

    journal          plan and batch | apply                      for every step, from GET /debug/steps
    timed runner     to the model's thread | model | back        the same steps, as the model's thread saw them
    timed jobs       what the event loop's thread did meanwhile
    a task, a thread how late either gets to what is due

The requests come from a client in a process of its own. Runs in the main thread, as `server.launch` does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from config.settings import Settings

if TYPE_CHECKING:
    from models.timed_runner import Timing

TICK_SECONDS = 0.01
STEPS = 1000  # asked of the journal, which keeps fewer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags beside those of serve."""
    parser.add_argument(
        "--sets", nargs="+", default=["chat:48:16"], metavar="SET", help="KIND:REQUESTS:CONCURRENCY [chat:48:16]"
    )


def run(settings: Settings, sets: Sequence[str], began: float) -> int:
    """Serve the sets and print; 1 when the client failed. Raises ConfigError or ModelError."""
    import uvloop
    from rich.console import Console

    from models.timed_runner import Timing
    from server.keys import KeyRing
    from server.launch import SWITCH_INTERVAL_SECONDS
    from server.listen import bind
    from server.loading import load_model
    from server.spans import timed_jobs
    from server.startup import Phases
    from server.step_times import event_loop_table, latency_line, step_table
    from server.wiring import run as serve

    settings = settings.model_copy(update={"host": "127.0.0.1", "port": 0, "api_key": ()})
    if settings.cache_dir is not None:
        os.environ["OCTAVO_CACHE_DIR"] = str(settings.cache_dir)
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    phases = Phases(began)
    bound = bind(settings.host, settings.port)
    model = load_model(settings, phases, lambda plan: None, lambda: None)
    timing = Timing(model.runner)
    watch = Watch(sets, timing)
    with timed_jobs() as jobs, asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        loop.run(serve(settings, model, None, KeyRing(), bound, phases, watch.begin))

    console = Console(highlight=False)
    if watch.client_code or not watch.steps:
        console.print("the client failed: nothing to show", style="red")
        return 1
    sampling = timing.sampling_seconds_per_row(model.plan.threads)
    console.print(step_table(watch.steps, timing.calls, sampling))
    console.print(event_loop_table(jobs, len(timing.calls), watch.seconds, watch.thread_seconds))
    console.print(latency_line("the event loop gets to what is due", watch.ticks), soft_wrap=True)
    late = latency_line("a thread that wakes gets a core and the interpreter", watch.sleeper.late_seconds)
    console.print(late, soft_wrap=True)
    return 0


class Watch:
    """Everything that looks on while the sets are served. Begins on the event loop; ends in a thread of its own."""

    def __init__(self, sets: Sequence[str], timing: Timing) -> None:
        from server.spans import Sleeper

        self.sleeper = Sleeper()
        self.ticks: list[float] = []  # seconds late
        self.steps: list[dict[str, Any]] = []  # the journal's last
        self.seconds = 0.0
        self.thread_seconds: dict[str, tuple[float, float]] = {}  # computing, and waiting for a core
        self.client_code = 1
        self._sets = sets
        self._timing = timing

    def begin(self, url: str) -> None:
        """The daemon answers at `url`."""
        self._timing.calls.clear()  # the first token, at start
        self._ticking = asyncio.get_running_loop().create_task(self._tick())
        threading.Thread(target=self._watch, args=(url,), name="octavo-client").start()

    async def _tick(self) -> None:
        while True:
            due = time.perf_counter() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            self.ticks.append(time.perf_counter() - due)

    def _watch(self, url: str) -> None:
        """Run the client, read the journal, and end the daemon as a signal from outside would."""
        try:
            before = self._thread_times()
            self.sleeper.start()
            began = time.perf_counter()
            command = [sys.executable, "-m", "loadtest.bench", url, *self._sets]
            self.client_code = subprocess.run(command, check=False).returncode
            self.seconds = time.perf_counter() - began
            self.sleeper.stop()
            for name, (computed, waited) in self._thread_times().items():
                earlier = before.get(name, (0.0, 0.0))
                self.thread_seconds[name] = computed - earlier[0], waited - earlier[1]
            with urllib.request.urlopen(f"{url}/debug/steps?limit={STEPS}", timeout=10) as answer:
                self.steps = json.load(answer)["steps"]
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def _thread_times(self) -> dict[str, tuple[float, float]]:
        from server.spans import thread_times

        found = {}
        for thread in threading.enumerate():
            name = "event loop" if thread is threading.main_thread() else "model"
            ours = name == "event loop" or thread.name.startswith("octavo-model")
            if ours and thread.native_id and (times := thread_times(thread.native_id)) is not None:
                found[name] = times
        return found
